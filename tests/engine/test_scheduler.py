from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.engine.admission import StaticAdmission
from cbatch_cli.engine.kv_groups import sequence_blocks
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.engine.sequence import Sequence
from cbatch_cli.engine.step import SchedulerOutput
from cbatch_cli.request import FinishReason, Request, RequestKey
from tests.fakes import FakeRunner, expected_output, make_request, make_scheduler

EOS = frozenset({5})
WINDOWS = ((None,), (None, 5), (3,), (None, 4, 4), (1, None), (None, 2, 9), (17, None))
steps_run = 0


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Requests of very different lengths, many of which share a prefix."""
    shared = draw(st.lists(st.integers(0, 96), min_size=0, max_size=40))
    requests = []
    for row in range(draw(st.integers(1, 14))):
        own = draw(st.lists(st.integers(0, 96), min_size=1, max_size=30))
        keep = draw(st.integers(0, len(shared)))
        requests.append(
            make_request(
                row,
                shared[:keep] + own,
                max_tokens=draw(st.integers(1, 25)),
                ignore_eos=draw(st.booleans()),
                stop_token_ids=tuple(draw(st.lists(st.integers(0, 96), max_size=2))),
            )
        )
    return requests


def check_step(
    scheduler: Scheduler, step: SchedulerOutput, requests: Mapping[RequestKey, Request]
) -> None:
    for scheduled in step.scheduled:
        request = requests[scheduled.key]
        most = len(request.prompt_token_ids) + request.params.max_tokens
        end = scheduled.start + scheduled.num_tokens
        assert end < min(most, scheduler.max_sequence_tokens), "computed for a token not wanted"
    assert step.num_tokens <= scheduler.max_num_batched_tokens
    assert len(step.scheduled) <= scheduler.max_num_seqs
    assert len({s.slot for s in step.scheduled}) == len(step.scheduled)
    assert len({s.key for s in step.scheduled}) == len(step.scheduled)
    lengths = [s.num_tokens > 1 for s in step.scheduled]
    assert lengths == sorted(lengths), "sequences with one token come first"


def drive(
    scheduler: Scheduler,
    runner: FakeRunner,
    requests: list[Request],
    *,
    arrivals_per_step: int,
    lag: int,
) -> dict[int, Sequence]:
    """Run to the end and check the books at every step.

    A step runs and its results come back `lag` schedules late: so much later does it read.
    """
    global steps_run
    ended: dict[int, Sequence] = {}
    pending = deque(requests)
    in_flight: deque[SchedulerOutput] = deque()
    runner.watch(scheduler.blocks.allocator)
    idle = 0
    num_rounds = 0
    while pending or scheduler.has_unfinished or in_flight:
        num_rounds += 1
        assert num_rounds < 20_000, "sequences preempt each other for ever"
        for _ in range(arrivals_per_step):
            if pending:
                sequence = Sequence(pending.popleft(), num_kv_groups=len(scheduler.blocks.windows))
                scheduler.add(sequence)
        scheduler.input_open = bool(pending)
        step = scheduler.schedule()
        if step is not None:
            steps_run += 1
            check_step(scheduler, step, {r.key: r for r in requests})
            in_flight.append(step)
        scheduler.check_integrity()
        if in_flight and (step is None or len(in_flight) > lag):
            for sequence in scheduler.update(runner.execute(in_flight.popleft())):
                assert sequence.key.row not in ended, "a sequence ended twice"
                ended[sequence.key.row] = sequence
            scheduler.check_integrity()
            idle = 0
        else:
            idle += step is None
        assert idle <= len(requests) + 1, "no progress"
    assert scheduler.blocks.usage == 0.0
    return ended


@settings(max_examples=400, deadline=None)
@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    prefix_caching=st.booleans(),
    static=st.booleans(),
    arrivals_per_step=st.integers(1, 14),
    lag=st.integers(0, 2),
    windows=st.sampled_from(WINDOWS),
)
def test_any_schedule_gives_the_answers_of_running_alone(
    requests: list[Request],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
    static: bool,
    arrivals_per_step: int,
    lag: int,
    windows: tuple[int | None, ...],
) -> None:
    longest = max(len(r.prompt_token_ids) for r in requests) + 2
    num_blocks = sequence_blocks(windows, longest, block_size) + spare_blocks
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
        eos_token_ids=EOS,
        policy=StaticAdmission(min(max_num_seqs, budget)) if static else None,
        windows=windows,
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, windows=windows)
    ended = drive(scheduler, runner, requests, arrivals_per_step=arrivals_per_step, lag=lag)
    assert sorted(ended) == [r.key.row for r in requests]
    for request in requests:
        sequence = ended[request.key.row]
        assert sequence.output_token_ids == expected_output(
            request,
            eos_token_ids=EOS,
            max_sequence_tokens=scheduler.max_sequence_tokens,
            windows=windows,
        )
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else EOS)
        is_stop = sequence.output_token_ids[-1] in stops
        assert sequence.finish_reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)


def test_enough_steps_were_driven() -> None:
    assert steps_run >= 10_000, "the random schedules above are too short to mean much"


def run_all(scheduler: Scheduler, requests: list[Request]) -> list[SchedulerOutput]:
    num_blocks = scheduler.blocks.allocator.num_blocks
    runner = FakeRunner(num_blocks=num_blocks, block_size=scheduler.blocks.block_size)
    drive(scheduler, runner, requests, arrivals_per_step=len(requests), lag=0)
    return runner.steps


def test_no_decode_waits_for_more_than_one_chunk_of_a_long_prompt() -> None:
    short = [make_request(row, [row], max_tokens=40) for row in range(3)]
    long = make_request(3, list(range(90)) * 2, max_tokens=2)
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=16)
    steps = run_all(scheduler, [*short, long])
    chunks = [s for step in steps for s in step.scheduled if s.key.row == 3 and s.num_tokens > 1]
    assert len(chunks) > 10, "the long prompt is cut into chunks"
    decoded_in = {row: [] for row in range(3)}
    for number, step in enumerate(steps):
        for scheduled in step.scheduled:
            if scheduled.key.row < 3:
                decoded_in[scheduled.key.row].append(number)
    for numbers in decoded_in.values():
        assert numbers == list(range(numbers[0], numbers[0] + 40)), "a decode missed a step"


def test_a_freed_slot_is_refilled_in_the_next_step_while_anything_waits() -> None:
    requests = [
        make_request(row, [row] * (1 + row % 7), max_tokens=1 + row % 5) for row in range(40)
    ]
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=8)
    for step in run_all(scheduler, requests):
        assert step.num_running == 4 or step.num_waiting == 0


def test_a_long_prefill_does_not_keep_newcomers_out() -> None:
    long = make_request(0, list(range(97)), max_tokens=1)
    requests = [long, *(make_request(row, [row], max_tokens=3) for row in range(1, 10))]
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=3, max_num_batched_tokens=8)
    for step in run_all(scheduler, requests):
        assert step.num_running == 3 or step.num_waiting == 0


def test_static_admission_waits_for_the_whole_batch() -> None:
    requests = [make_request(row, [row], max_tokens=1 + row) for row in range(6)]
    scheduler = make_scheduler(max_num_seqs=3, policy=StaticAdmission(3))
    steps = run_all(scheduler, requests)
    rows = [sorted(s.key.row for s in step.scheduled) for step in steps]
    assert rows == [[0, 1, 2], [1, 2], [2], [3, 4, 5], [3, 4, 5], [3, 4, 5], [3, 4, 5], [4, 5], [5]]


def test_the_youngest_is_preempted_and_resumes_first() -> None:
    requests = [make_request(row, [row] * 4, max_tokens=12, ignore_eos=True) for row in range(3)]
    scheduler = make_scheduler(num_blocks=9, block_size=2, max_num_seqs=2, prefix_caching=False)
    steps = run_all(scheduler, requests)
    preempted = [key.row for step in steps for key in step.preempted]
    assert preempted and set(preempted) <= {1, 2}
    assert scheduler.num_preemptions == len(preempted)
    assert scheduler.num_recomputed_tokens > 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    prompt = list(range(20))
    requests = [make_request(0, prompt, max_tokens=1), make_request(1, prompt, max_tokens=1)]
    scheduler = make_scheduler(max_num_seqs=1, block_size=4, max_num_batched_tokens=64)
    steps = run_all(scheduler, requests)
    # 20 tokens are five blocks; the last token is always computed, so four blocks are shared.
    assert [step.num_tokens for step in steps] == [20, 4]


def test_a_sequence_that_fills_the_pool_alone_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    request = make_request(0, [1] * 5, max_tokens=100, ignore_eos=True)
    runner = FakeRunner(num_blocks=3, block_size=4)
    ended = drive(scheduler, runner, [request], arrivals_per_step=1, lag=0)
    assert ended[0].finish_reason is FinishReason.LENGTH
    assert len(ended[0].token_ids) == 12


def test_finish_from_outside_trims_and_frees() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(num_blocks=64, block_size=4)
    scheduler.add(Sequence(make_request(0, [1, 2], max_tokens=50, ignore_eos=True)))
    for _ in range(5):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(runner.execute(step))
    sequence = scheduler.finish(step.scheduled[0].key, 3, FinishReason.STOP_SEQUENCE)
    assert sequence is not None and len(sequence.output_token_ids) == 3
    assert not scheduler.has_unfinished and scheduler.blocks.usage == 0.0
    assert scheduler.finish(sequence.key, 3, FinishReason.STOP_SEQUENCE) is None


def test_a_key_can_be_in_the_engine_only_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(Sequence(make_request(0, [1])))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(Sequence(make_request(0, [1])))


def test_blocks_stay_while_a_step_in_flight_may_write_to_them() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(num_blocks=64, block_size=4)
    request = make_request(0, [1, 2], max_tokens=50, stop_token_ids=tuple(range(97)))
    scheduler.add(Sequence(request))
    first = scheduler.schedule()
    assert first is not None
    sampled = runner.execute(first)
    second = scheduler.schedule()
    assert second is not None, "the next token is scheduled before the first is known"
    assert [s.finish_reason for s in scheduler.update(sampled)] == [FinishReason.STOP]
    assert not scheduler.has_unfinished and scheduler.blocks.usage > 0.0
    assert scheduler.update(runner.execute(second)) == [], "the surplus id is dropped"
    assert scheduler.blocks.usage == 0.0


def test_nobody_is_preempted_for_blocks_that_steps_in_flight_will_give_back() -> None:
    windows = (3, None)
    num_blocks = sequence_blocks(windows, 20, 1)
    scheduler = make_scheduler(
        num_blocks=num_blocks, block_size=1, max_num_batched_tokens=5, windows=windows
    )
    runner = FakeRunner(num_blocks=num_blocks, block_size=1, windows=windows)
    request = make_request(0, range(18), max_tokens=9, ignore_eos=True)
    ended = drive(scheduler, runner, [request], arrivals_per_step=1, lag=2)
    assert scheduler.num_preemptions == 0
    assert len(ended[0].token_ids) == scheduler.max_sequence_tokens == 20
