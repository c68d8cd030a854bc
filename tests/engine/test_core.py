from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch_cli.engine.admission import StaticAdmission
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import DeviceMemoryError, EngineError, RowErrorType
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput
from tests.fakes import FakeRunner, expected_output, make_request, make_scheduler

ROOT = Path(__file__).parents[2]


def make_core(**settings: object) -> EngineCore:
    scheduler = make_scheduler(**settings)  # type: ignore[arg-type]
    blocks = scheduler.blocks
    runner = FakeRunner(num_blocks=blocks.allocator.num_blocks, block_size=blocks.block_size)
    return EngineCore(scheduler=scheduler, runner=runner)


def requests(count: int) -> Iterator[Request]:
    return (make_request(row, [row, row + 1], max_tokens=1 + row % 6) for row in range(count))


def test_every_request_comes_back_once_with_its_answer() -> None:
    core = make_core()
    outputs = {output.key.row: output for output in core.generate(requests(50))}
    assert sorted(outputs) == list(range(50))
    for request in requests(50):
        output = outputs[request.key.row]
        assert output.token_ids == expected_output(request, max_sequence_tokens=256)
        assert output.metrics.prompt_tokens == 2
        assert output.metrics.completion_tokens == len(output.token_ids)
        assert output.metrics.ttft_s is not None and output.metrics.queue_s is not None
        assert output.metrics.queue_s <= output.metrics.ttft_s <= output.metrics.e2e_s


def test_windows_full_of_requests_that_are_refused_do_not_stop_the_input() -> None:
    core = make_core(max_num_seqs=2)
    outputs = list[RequestOutput]()
    given = (make_request(row, [1] * (row == 999)) for row in range(1000))
    thread = threading.Thread(target=lambda: outputs.extend(core.generate(given)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert [output.key.row for output in outputs] == list(range(1000))
    errors = [output.error.type if output.error else None for output in outputs]
    assert errors == [RowErrorType.EMPTY_PROMPT] * 999 + [None]


def test_outputs_come_in_the_order_in_which_they_finish() -> None:
    core = make_core(max_num_seqs=2)
    lengths = [9, 1, 1, 1]
    given = [make_request(row, [row], max_tokens=n) for row, n in enumerate(lengths)]
    assert [output.key.row for output in core.generate(given)] == [1, 2, 3, 0]


def test_the_input_is_pulled_only_as_far_as_the_window() -> None:
    pulled = 0

    def endless() -> Iterator[Request]:
        nonlocal pulled
        while True:
            pulled += 1
            yield make_request(pulled, [1], max_tokens=3)

    core = make_core(max_num_seqs=4)
    outputs = core.generate(endless())
    for number in range(1, 200):
        next(outputs)
        # Finished, running, waiting within the window, and one in the hands of the feeder.
        assert pulled <= number + 4 + 8 + 1 + 4
    outputs.close()
    assert not core.scheduler.has_unfinished and core.scheduler.blocks.usage == 0.0


def test_a_slow_input_holds_up_no_running_sequence() -> None:
    finished_first = threading.Event()

    def slow() -> Iterator[Request]:
        yield make_request(0, [1], max_tokens=5)
        assert finished_first.wait(30), "the first row did not finish before the second was read"
        yield make_request(1, [2], max_tokens=1)

    rows = []
    for output in make_core().generate(slow()):
        rows.append(output.key.row)
        finished_first.set()
    assert rows == [0, 1]


def test_submit_from_another_thread_joins_the_running_generation() -> None:
    core = make_core()

    def main_input() -> Iterator[Request]:
        yield make_request(0, [1], max_tokens=2)
        thread = threading.Thread(target=core.submit, args=(make_request(7, [3], max_tokens=2),))
        thread.start()
        thread.join()

    assert sorted(output.key.row for output in core.generate(main_input())) == [0, 7]
    core.submit(make_request(8, [3], max_tokens=1))
    assert [output.key.row for output in core.generate([])] == [8]


def test_an_exception_of_the_input_is_raised_after_what_was_read() -> None:
    def broken() -> Iterator[Request]:
        yield make_request(0, [1], max_tokens=3)
        raise OSError("disk gone")

    core = make_core()
    rows = []
    with pytest.raises(OSError, match="disk gone"):
        for output in core.generate(broken()):
            rows.append(output.key.row)
    assert rows == [0]


def test_a_request_that_cannot_run_is_an_output_with_an_error() -> None:
    core = make_core(num_blocks=3, block_size=4)
    given = [
        make_request(0, [1] * 12, max_tokens=1),
        make_request(1, [], max_tokens=1),
        make_request(2, [1] * 11, max_tokens=9),
    ]
    outputs = {output.key.row: output for output in core.generate(given)}
    assert outputs[0].error is not None and outputs[0].error.type is RowErrorType.PROMPT_TOO_LONG
    assert "12" in outputs[0].error.message
    assert outputs[1].error is not None and outputs[1].error.type is RowErrorType.EMPTY_PROMPT
    assert outputs[2].error is None and outputs[2].finish_reason is FinishReason.LENGTH


def test_the_listener_can_end_a_sequence_before_its_next_step() -> None:
    core = make_core()
    told: list[tuple[int, ...]] = []

    def listen(token_ids: dict[RequestKey, tuple[int, ...]]) -> None:
        for key, new in token_ids.items():
            told.append(new)
            if len(told) == 3:
                core.finish(key, 2, FinishReason.STOP_SEQUENCE)

    core.token_listener = listen  # type: ignore[assignment]
    request = make_request(0, [1, 2], max_tokens=50, stop=("x",))
    silent = make_request(1, [5], max_tokens=10)
    outputs = {output.key.row: output for output in core.generate([request, silent])}
    assert outputs[0].finish_reason is FinishReason.STOP_SEQUENCE
    expected = expected_output(request, max_sequence_tokens=256)
    assert outputs[0].token_ids == expected[:2] and len(told) == 3


def test_resumed_ids_are_prefilled_not_decoded_again() -> None:
    request = make_request(0, [1, 2], max_tokens=10)
    whole = expected_output(request, max_sequence_tokens=256)
    resumed = Request(
        key=request.key,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        resumed_token_ids=whole[:6],
        attempt=2,
    )
    core = make_core()
    (output,) = core.generate([resumed])
    assert output.token_ids == whole and output.metrics.attempt == 2
    assert core.stats.num_output_tokens == 4


def test_a_failing_runner_ends_the_generation_with_an_engine_error() -> None:
    class BrokenRunner:
        def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
            raise RuntimeError("no such kernel")

    core = EngineCore(scheduler=make_scheduler(), runner=BrokenRunner())
    with pytest.raises(EngineError, match="step 0 failed: no such kernel"):
        list(core.generate(requests(3)))


def test_unusable_logits_fail_their_row_alone() -> None:
    class HalfBroken(FakeRunner):
        def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
            output = super().execute(step)
            token_ids = dict(output.token_ids)
            failed = {}
            if token_ids.pop(RequestKey(1), None):
                failed = {RequestKey(1): "not finite"}
            return StepOutput(step_id=step.step_id, token_ids=token_ids, failed=failed)

    core = EngineCore(scheduler=make_scheduler(), runner=HalfBroken(num_blocks=64, block_size=4))
    outputs = {output.key.row: output for output in core.generate(requests(4))}
    assert outputs[1].error is not None and outputs[1].error.type is RowErrorType.ENGINE_ERROR
    assert all(outputs[row].error is None for row in (0, 2, 3))


def test_static_admission_ends_with_a_batch_that_is_not_full() -> None:
    core = make_core(max_num_seqs=4, policy=StaticAdmission(4))
    assert len(list(core.generate(requests(10)))) == 10


def test_occupancy_counts_the_steps_in_which_anything_waits() -> None:
    core = make_core(max_num_seqs=2)
    for row in range(9):
        core.submit(make_request(row, [1], max_tokens=4))
    list(core.generate([]))
    summary = core.stats.summary()
    assert summary["output_tokens"] == 36 and summary["prompt_tokens"] == 9
    assert summary["steps"] == 20
    # The ninth row runs alone: half of the slots in the last four of twenty steps.
    assert summary["step_occupancy"] == pytest.approx(0.9)
    assert summary["step_occupancy_until_tail"] == 1.0


def test_stop_hands_out_what_is_unfinished_with_the_ids_it_has() -> None:
    core = make_core(max_num_seqs=2)
    for row in range(5):
        core.submit(make_request(row, [row], max_tokens=3 if row == 0 else 200, ignore_eos=True))
    outputs = []
    for output in core.generate([]):
        outputs.append(output)
        core.stop()
    assert outputs[0].key.row == 0 and outputs[0].finish_reason is FinishReason.LENGTH
    rest = {output.key.row: output for output in outputs[1:]}
    assert sorted(rest) == [1, 2, 3, 4]
    assert all(output.finish_reason is FinishReason.CANCELLED for output in rest.values())
    whole = expected_output(make_request(1, [1], max_tokens=200), max_sequence_tokens=256)
    assert len(rest[1].token_ids) >= 3
    assert rest[1].token_ids == whole[: len(rest[1].token_ids)]
    assert rest[4].token_ids == ()
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0.0


class ForgetfulRunner(FakeRunner):
    """Fails on steps of more than `most` tokens, after it has written half of them."""

    most = 6

    def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
        if step.num_tokens > self.most:
            self.cache = [-7] * len(self.cache)
            raise DeviceMemoryError("too big")
        return super().execute(step)


def test_a_step_that_does_not_fit_is_tried_again_in_smaller_pieces() -> None:
    core = EngineCore(
        scheduler=make_scheduler(max_num_seqs=8, max_num_batched_tokens=40),
        runner=ForgetfulRunner(num_blocks=64, block_size=4),
    )
    given = [make_request(row, range(row, row + 20), max_tokens=30) for row in range(12)]
    outputs = {output.key.row: output for output in core.generate(given)}
    for request in given:
        assert outputs[request.key.row].token_ids == expected_output(
            request, max_sequence_tokens=256
        )
    assert core.stats.num_preemptions > 0


def test_a_row_for_which_no_step_is_small_enough_fails_alone() -> None:
    class Choking(FakeRunner):
        def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
            if any(s.key.row == 2 and s.start + s.num_tokens > 9 for s in step.scheduled):
                raise DeviceMemoryError("too big")
            return super().execute(step)

    core = EngineCore(scheduler=make_scheduler(), runner=Choking(num_blocks=64, block_size=4))
    given = [make_request(row, [row] * 5, max_tokens=20, ignore_eos=True) for row in range(5)]
    outputs = {output.key.row: output for output in core.generate(given)}
    error = outputs[2].error
    assert error is not None and error.type is RowErrorType.OUT_OF_MEMORY and error.retryable
    for row in (0, 1, 3, 4):
        assert outputs[row].token_ids == expected_output(given[row], max_sequence_tokens=256)


HANGING = """
import time
from cbatch_cli.engine.core import EngineCore
from tests.fakes import make_request, make_scheduler

class Hanging:
    def execute(self, step, stats):
        time.sleep(60)

core = EngineCore(scheduler=make_scheduler(), runner=Hanging(), step_timeout_s=0.4)
list(core.generate([make_request(0, [1])]))
"""


def test_a_step_that_never_ends_is_told_and_ends_the_process() -> None:
    child = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=50, cwd=ROOT
    )
    assert child.returncode == 6
    assert "has not ended in 0.4 s: step 0, 1 running" in child.stderr
    assert "in execute" in child.stderr, "the stacks are dumped"


@pytest.mark.parametrize(
    ("prompt", "stop_token_ids", "error"),
    [
        ([1, 100], (), RowErrorType.BAD_TYPE),
        ([-1, 2], (), RowErrorType.BAD_TYPE),
        ([1], (3, 100), RowErrorType.INVALID_OPTION),
        ([1, 99], (99,), None),
    ],
)
def test_ids_beyond_the_vocabulary_fail_their_row_alone(
    prompt: list[int], stop_token_ids: tuple[int, ...], error: RowErrorType | None
) -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(num_blocks=64, block_size=4)
    core = EngineCore(scheduler=scheduler, runner=runner, vocab_size=100)
    given = make_request(0, prompt, max_tokens=2)
    params = dataclasses.replace(given.params, stop_token_ids=stop_token_ids)
    outputs = list(
        core.generate(
            [dataclasses.replace(given, params=params), make_request(1, [5], max_tokens=2)]
        )
    )
    by_row = {output.key.row: output.error for output in outputs}
    assert by_row[1] is None
    assert (by_row[0] and by_row[0].type) == error
