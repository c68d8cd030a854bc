"""With steps in flight the engine gives what it gives without.

The fake device computes a step at the last moment, when its results are asked for: by then the
next ones have been scheduled, and blocks that were freed too early have been poisoned or written
by others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_groups import sequence_blocks
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import DeviceMemoryError, EngineError, RowErrorType
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput
from tests.engine.test_scheduler import EOS, WINDOWS, workloads
from tests.fakes import LateRunner, LateStep, expected_output, make_request, make_scheduler

ROOT = Path(__file__).parents[2]
EARLY = {"launched_early": 0}


def late_core(
    *,
    lag: int = 1,
    windows: tuple[int | None, ...] = (None,),
    num_blocks: int = 64,
    block_size: int = 4,
    runner: Callable[..., LateRunner] = LateRunner,
    **sizes: object,
) -> EngineCore:
    """An engine over a late runner, whose books are checked around every step."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=windows,
        **sizes,  # type: ignore[arg-type]
    )
    late = runner(lag=lag, num_blocks=num_blocks, block_size=block_size, windows=windows)
    late.watch(scheduler.blocks.allocator)
    schedule, update = scheduler.schedule, scheduler.update

    def checked_schedule() -> SchedulerOutput | None:
        step = schedule()
        scheduler.check_integrity()
        assert scheduler.num_in_flight <= lag + 1
        return step

    def checked_update(sampled: StepOutput) -> list[object]:
        ended = update(sampled)
        scheduler.check_integrity()
        return ended  # type: ignore[return-value]

    scheduler.schedule = checked_schedule  # type: ignore[method-assign]
    scheduler.update = checked_update  # type: ignore[method-assign, assignment]
    return EngineCore(scheduler=scheduler, runner=late)


def runner_of(core: EngineCore) -> LateRunner:
    assert isinstance(core._runner, LateRunner)
    return core._runner


def by_row(outputs: Iterator[RequestOutput]) -> dict[int, RequestOutput]:
    found: dict[int, RequestOutput] = {}
    for output in outputs:
        assert output.key.row not in found, "a request ended twice"
        found[output.key.row] = output
    return found


def is_at_rest(core: EngineCore) -> bool:
    """Whether nothing is left in the books."""
    core.scheduler.check_integrity()
    return (
        not core.scheduler.has_unfinished
        and core.scheduler.num_in_flight == 0
        and core.scheduler.blocks.usage == 0.0
    )


def rows(count: int, **params: object) -> list[Request]:
    return [
        make_request(row, [row % 7, row, row + 1][: 1 + row % 3], max_tokens=1 + row % 9, **params)
        for row in range(count)
    ]


@settings(max_examples=150, deadline=None)
@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    prefix_caching=st.booleans(),
    lag=st.integers(1, 2),
    windows=st.sampled_from(WINDOWS),
)
def test_steps_in_flight_change_no_answer(
    requests: list[Request],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
    lag: int,
    windows: tuple[int | None, ...],
) -> None:
    longest = max(len(r.prompt_token_ids) for r in requests) + 2
    core = late_core(
        lag=lag,
        windows=windows,
        num_blocks=sequence_blocks(windows, longest, block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
        eos_token_ids=EOS,
    )
    for request in requests:
        core.submit(request)
    outputs = by_row(core.generate([]))
    assert sorted(outputs) == [request.key.row for request in requests]
    for request in requests:
        output = outputs[request.key.row]
        assert output.token_ids == expected_output(
            request,
            eos_token_ids=EOS,
            max_sequence_tokens=core.max_sequence_tokens,
            windows=windows,
        )
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else EOS)
        is_stop = output.token_ids[-1] in stops
        assert output.finish_reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
    assert is_at_rest(core)
    assert core.stats.num_output_tokens == sum(len(o.token_ids) for o in outputs.values())
    EARLY["launched_early"] += runner_of(core).num_launched_early


def test_many_steps_were_launched_while_another_was_in_flight() -> None:
    assert EARLY["launched_early"] > 1000


def test_a_step_is_launched_before_the_ids_of_the_one_before_it_are_known() -> None:
    core = late_core()
    (output,) = core.generate([make_request(0, [1, 2], max_tokens=20, ignore_eos=True)])
    assert len(output.token_ids) == 20
    # All but the first, and none for the token after the last, whose place is known.
    assert runner_of(core).num_launched_early == 19
    assert len(runner_of(core).steps) == 20 and core.scheduler.num_surplus_tokens == 0


def test_the_token_sampled_after_a_stop_is_dropped_and_not_counted() -> None:
    request = make_request(0, [1, 2], max_tokens=50, ignore_eos=True)
    whole = expected_output(request, max_sequence_tokens=256)
    stop = next(i for i, token_id in enumerate(whole) if token_id not in whole[:i] and i > 3)
    core = late_core()
    (output,) = core.generate(
        [make_request(0, [1, 2], max_tokens=50, stop_token_ids=(whole[stop],))]
    )
    assert output.token_ids == whole[: stop + 1]
    assert output.finish_reason is FinishReason.STOP
    assert core.scheduler.num_surplus_tokens == 1
    assert core.stats.num_output_tokens == stop + 1
    assert is_at_rest(core)


def test_a_tiny_pool_preempts_and_nothing_is_lost() -> None:
    core = late_core(num_blocks=7, block_size=2, max_num_seqs=4, prefix_caching=False)
    given = [make_request(row, [row] * 3, max_tokens=9, ignore_eos=True) for row in range(12)]
    outputs = by_row(core.generate(given))
    assert core.stats.num_preemptions > 0
    for request in given:
        expected = expected_output(request, max_sequence_tokens=core.max_sequence_tokens)
        assert outputs[request.key.row].token_ids == expected
    assert is_at_rest(core)


def test_samples_of_one_row_are_apart() -> None:
    given = [
        Request(
            key=RequestKey(0, sample),
            prompt_token_ids=(5, 6, 7, 8, 9 + sample),
            params=make_request(0, [1], max_tokens=8).params,
        )
        for sample in range(5)
    ]
    core = late_core(block_size=2)
    outputs = {output.key: output.token_ids for output in core.generate(given)}
    assert outputs == {r.key: expected_output(r, max_sequence_tokens=128) for r in given}


def test_the_listener_ends_a_sequence_that_is_a_step_ahead() -> None:
    core = late_core()
    told: list[int] = []

    def listen(token_ids: Mapping[RequestKey, tuple[int, ...]]) -> None:
        for key, new in token_ids.items():
            told.extend(new)
            if len(told) == 3:
                core.finish(key, 2, FinishReason.STOP_SEQUENCE)

    core.token_listener = listen
    watched = make_request(0, [1, 2], max_tokens=50, stop=("x",), ignore_eos=True)
    silent = make_request(1, [5], max_tokens=10, ignore_eos=True)
    outputs = by_row(core.generate([watched, silent]))
    expected = expected_output(watched, max_sequence_tokens=256)
    assert outputs[0].token_ids == expected[:2]
    assert outputs[0].finish_reason is FinishReason.STOP_SEQUENCE
    assert tuple(told) == expected[:3], "the listener is told of no surplus token"
    assert outputs[1].token_ids == expected_output(silent, max_sequence_tokens=256)
    assert core.scheduler.num_surplus_tokens >= 1
    assert core.stats.num_output_tokens == 3 + 10
    assert is_at_rest(core)


def test_stop_waits_for_what_is_in_flight() -> None:
    core = late_core(max_num_seqs=2)
    for row in range(5):
        core.submit(make_request(row, [row], max_tokens=3 if row == 0 else 200, ignore_eos=True))
    outputs: dict[int, RequestOutput] = {}
    for output in core.generate([]):
        outputs[output.key.row] = output
        core.stop()
    assert outputs[0].finish_reason is FinishReason.LENGTH
    rest = [outputs[row] for row in range(1, 5)]
    assert all(output.finish_reason is FinishReason.CANCELLED for output in rest)
    whole = expected_output(make_request(1, [1], max_tokens=200), max_sequence_tokens=256)
    # Three steps came back, and the fourth, with one token of this row, was in flight.
    assert outputs[1].token_ids == whole[:4]
    assert is_at_rest(core)


def test_an_engine_that_is_left_with_a_step_in_flight_can_be_used_again() -> None:
    core = late_core(max_num_seqs=3)
    given = rows(9, ignore_eos=True)
    outputs = core.generate(given)
    next(outputs)
    outputs.close()
    assert is_at_rest(core)
    again = by_row(core.generate(given))
    for request in given:
        expected = expected_output(request, max_sequence_tokens=core.max_sequence_tokens)
        assert again[request.key.row].token_ids == expected


def make_failing(
    fails: Callable[[SchedulerOutput], bool], error: Exception, *, at_launch: bool
) -> Callable[..., LateRunner]:
    """A late runner some of whose steps raise, after they have written half of what they would."""

    class Failing(LateRunner):
        def launch(self, step: SchedulerOutput, stats: EngineStats) -> LateStep:
            launched = super().launch(step, stats)
            if at_launch and fails(step):
                raise error
            return launched

        def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
            if not at_launch and fails(step):
                self._scribble(step)
                raise error
            return super().execute(step)

    return Failing


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_step_that_does_not_fit_beside_one_in_flight_is_tried_in_pieces(at_launch: bool) -> None:
    failing = make_failing(
        lambda step: step.num_tokens > 6, DeviceMemoryError("too big"), at_launch=at_launch
    )
    core = late_core(runner=failing, max_num_seqs=8, max_num_batched_tokens=40)
    given = [make_request(row, range(row, row + 20), max_tokens=30) for row in range(12)]
    outputs = by_row(core.generate(given))
    for request in given:
        assert outputs[request.key.row].token_ids == expected_output(
            request, max_sequence_tokens=256
        )
    assert core.stats.num_preemptions > 0
    assert is_at_rest(core)


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_step_that_fails_after_a_row_of_it_has_ended_gives_its_blocks_back(
    at_launch: bool,
) -> None:
    given = [make_request(row, [row, 1], max_tokens=20, ignore_eos=True) for row in range(3)]
    whole = expected_output(given[0], max_sequence_tokens=256)
    stop = next(i for i, token_id in enumerate(whole) if token_id not in whole[:i] and i > 3)
    given[0] = make_request(0, [0, 1], max_tokens=20, stop_token_ids=(whole[stop],))
    failed = 0

    def fails(step: SchedulerOutput) -> bool:
        """The step that computes the surplus token of the first row does, once."""
        nonlocal failed
        is_surplus = any(s.key.row == 0 and s.start == 2 + stop for s in step.scheduled)
        failed += is_surplus
        return is_surplus and failed == 1

    failing = make_failing(fails, DeviceMemoryError("too big"), at_launch=at_launch)
    core = late_core(runner=failing, num_blocks=24)
    outputs = by_row(core.generate(given))
    assert failed == 1
    assert outputs[0].token_ids == whole[: stop + 1]
    for request in given[1:]:
        expected = expected_output(request, max_sequence_tokens=core.max_sequence_tokens)
        assert outputs[request.key.row].token_ids == expected
    assert is_at_rest(core)


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_row_for_which_no_step_is_small_enough_fails_alone(at_launch: bool) -> None:
    failing = make_failing(
        lambda step: any(s.key.row == 2 and s.start + s.num_tokens > 9 for s in step.scheduled),
        DeviceMemoryError("too big"),
        at_launch=at_launch,
    )
    core = late_core(runner=failing)
    given = [make_request(row, [row] * 5, max_tokens=20, ignore_eos=True) for row in range(5)]
    outputs = by_row(core.generate(given))
    error = outputs[2].error
    assert error is not None and error.type is RowErrorType.OUT_OF_MEMORY
    expected = expected_output(given[2], max_sequence_tokens=256)
    assert outputs[2].token_ids == expected[: len(outputs[2].token_ids)]
    for row in (0, 1, 3, 4):
        assert outputs[row].token_ids == expected_output(given[row], max_sequence_tokens=256)
    assert is_at_rest(core)


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_failing_device_ends_the_generation_with_an_engine_error(at_launch: bool) -> None:
    failing = make_failing(
        lambda step: step.step_id == 3, RuntimeError("illegal access"), at_launch=at_launch
    )
    core = late_core(runner=failing)
    given = [make_request(row, [row], max_tokens=9, ignore_eos=True) for row in range(6)]
    with pytest.raises(EngineError, match="step 3 failed: illegal access"):
        list(core.generate(given))
    assert is_at_rest(core)
    # The fourth step was the only one to fail.
    again = by_row(core.generate(given))
    for request in given:
        assert again[request.key.row].token_ids == expected_output(request, max_sequence_tokens=256)


def test_unusable_logits_fail_their_row_alone_though_it_is_a_step_ahead() -> None:
    class HalfBroken(LateRunner):
        def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
            output = super().execute(step)
            token_ids = dict(output.token_ids)
            failed = {}
            if step.step_id >= 2 and token_ids.pop(RequestKey(1), None):
                failed = {RequestKey(1): "not finite"}
            return StepOutput(step_id=step.step_id, token_ids=token_ids, failed=failed)

    core = late_core(runner=HalfBroken)
    given = [make_request(row, [row], max_tokens=9, ignore_eos=True) for row in range(4)]
    outputs = by_row(core.generate(given))
    assert outputs[1].error is not None and outputs[1].error.type is RowErrorType.ENGINE_ERROR
    assert outputs[1].token_ids == expected_output(given[1], max_sequence_tokens=256)[:2]
    for row in (0, 2, 3):
        assert outputs[row].token_ids == expected_output(given[row], max_sequence_tokens=256)
    assert is_at_rest(core)


HANGING = """
import time
from cbatch_cli.engine.core import EngineCore
from tests.fakes import LateRunner, make_request, make_scheduler

class Hanging(LateRunner):
    def execute(self, step, stats=None):
        if step.step_id == 2:
            time.sleep(60)
        return super().execute(step)

runner = Hanging(lag=1, num_blocks=64, block_size=4)
core = EngineCore(scheduler=make_scheduler(), runner=runner, step_timeout_s=0.4)
list(core.generate([make_request(0, [1], max_tokens=9, ignore_eos=True)]))
"""


def test_a_step_in_flight_that_never_ends_is_told_and_ends_the_process() -> None:
    child = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=50, cwd=ROOT
    )
    assert child.returncode == 6
    assert "has not ended in 0.4 s" in child.stderr and "in collect" in child.stderr


SLOW_READER = """
import time
from cbatch_cli.engine.core import EngineCore
from tests.fakes import LateRunner, make_request, make_scheduler

runner = LateRunner(lag=1, num_blocks=64, block_size=4)
core = EngineCore(scheduler=make_scheduler(max_num_seqs=2), runner=runner, step_timeout_s=0.4)
given = [make_request(row, [1], max_tokens=1 + 4 * row, ignore_eos=True) for row in range(2)]
for output in core.generate(given):
    time.sleep(1)
"""


def test_who_takes_the_outputs_may_be_slow_while_a_step_is_in_flight() -> None:
    child = subprocess.run(
        [sys.executable, "-c", SLOW_READER], capture_output=True, text=True, timeout=50, cwd=ROOT
    )
    assert child.returncode == 0, child.stderr
