from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.scheduler import StaticAdmission
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import EngineError, RowErrorType
from cbatch_cli.request import FinishReason, Request, RequestKey
from tests.fakes import FakeRunner, expected_output, make_request, make_scheduler


def make_core(**settings: object) -> EngineCore:
    scheduler = make_scheduler(**settings)  # type: ignore[arg-type]
    blocks = scheduler.blocks
    runner = FakeRunner(num_blocks=blocks.allocators[0].num_blocks, block_size=blocks.block_size)
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
