"""Windows of the KV cache: what is kept, what is given up when, and which prefixes are shared."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.kv_groups import sequence_blocks
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.engine.sequence import Sequence
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.request import FinishReason
from tests.fakes import FakeRunner, expected_output, make_request, make_scheduler


def make_sequence(scheduler: Scheduler, row: int, prompt: Ids[int], **params: object) -> Sequence:
    request = make_request(row, prompt, ignore_eos=True, **params)
    sequence = Sequence(request, num_kv_groups=len(scheduler.blocks.windows))
    scheduler.add(sequence)
    return sequence


def answer(step: SchedulerOutput) -> StepOutput:
    """Whatever is sampled is a 1."""
    token_ids = {s.key: (1,) for s in step.scheduled if s.samples}
    return StepOutput(step_id=step.step_id, token_ids=token_ids)


def next_step(scheduler: Scheduler) -> SchedulerOutput:
    step = scheduler.schedule()
    assert step is not None
    return step


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17])
def test_a_block_goes_back_after_the_step_that_last_saw_it(window: int, block_size: int) -> None:
    scheduler = make_scheduler(
        num_blocks=300, block_size=block_size, max_num_batched_tokens=7, windows=(None, window)
    )
    sequence = make_sequence(scheduler, 0, [3] * 40, max_tokens=30)
    full, windowed = sequence.block_tables
    while scheduler.has_unfinished:
        step = next_step(scheduler)
        start, end = step.scheduled[0].start, step.scheduled[0].start + step.num_tokens
        # While the step runs, its first query sees `window` positions.
        assert windowed.first == max(0, start - window + 1) // block_size
        assert windowed.end == -(-end // block_size)
        scheduler.update(answer(step))
        if scheduler.has_unfinished:
            assert windowed.first == max(0, end - window + 1) // block_size
            assert full.first == 0
    assert scheduler.blocks.usage == 0.0


def test_blocks_stay_while_a_step_in_flight_sees_them() -> None:
    scheduler = make_scheduler(
        num_blocks=30, block_size=1, max_num_batched_tokens=4, windows=(3,), prefix_caching=False
    )
    sequence = make_sequence(scheduler, 0, [3] * 12, max_tokens=3)
    (table,) = sequence.block_tables
    steps = [next_step(scheduler) for _ in range(3)]
    assert table.first == 0 and table.end == 12, "nothing has run"
    held = table.block_ids[:]
    scheduler.update(answer(steps[0]))
    assert (table.first, table.end) == (2, 12), "the second step sees from 2 on"
    assert scheduler.blocks.num_returning(sequence) == 10 - 2
    scheduler.update(answer(steps[1]))
    assert (table.first, table.end) == (6, 12)
    assert table.block_ids == held[6:]
    scheduler.check_integrity()


def test_gemma3_at_8k_takes_less_than_a_quarter() -> None:
    windows = (512, 512, 512, 512, 512, None)
    budget, block_size = 256, 16
    scheduler = make_scheduler(
        num_blocks=6 * 8192 // block_size,
        block_size=block_size,
        max_num_batched_tokens=budget,
        windows=windows,
    )
    make_sequence(scheduler, 0, range(8000), max_tokens=192)
    most_running = most_between = 0
    while scheduler.has_unfinished:
        step = next_step(scheduler)
        most_running = max(most_running, scheduler.blocks.allocator.num_used)
        scheduler.update(answer(step))
        most_between = max(most_between, scheduler.blocks.allocator.num_used)
    assert most_between <= sequence_blocks(windows, 8192, block_size)
    assert most_between / scheduler.blocks.allocator.num_blocks < 0.2205
    assert most_running <= most_between + 5 * (budget // block_size)


def test_a_chunk_shrinks_to_the_blocks_that_are_free() -> None:
    windows = (4, 4, None)
    scheduler = make_scheduler(
        num_blocks=sequence_blocks(windows, 32, 1),
        block_size=1,
        max_num_batched_tokens=100,
        windows=windows,
    )
    assert scheduler.max_sequence_tokens == 32
    runner = FakeRunner(num_blocks=40, block_size=1, windows=windows)
    runner.watch(scheduler.blocks.allocator)
    sequence = make_sequence(scheduler, 0, range(30), max_tokens=50)
    while scheduler.has_unfinished:
        step = next_step(scheduler)
        scheduler.update(runner.execute(step))
        scheduler.check_integrity()
    assert [step.num_tokens for step in runner.steps][:2] == [5, 2]
    assert scheduler.num_preemptions == 0
    assert sequence.finish_reason is FinishReason.LENGTH and len(sequence.token_ids) == 32
    assert sequence.output_token_ids == expected_output(
        sequence.request, max_sequence_tokens=32, windows=windows
    )


def test_windows_alone_set_no_limit_to_the_length() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, windows=(6,), max_model_len=500)
    assert scheduler.max_sequence_tokens == 500
    sequence = make_sequence(scheduler, 0, range(90), max_tokens=1000)
    while scheduler.has_unfinished:
        scheduler.update(answer(next_step(scheduler)))
    assert len(sequence.token_ids) == 500


def test_the_runner_is_told_where_a_shared_window_begins() -> None:
    scheduler = make_scheduler(
        num_blocks=60, block_size=2, max_num_seqs=1, max_num_batched_tokens=64, windows=(None, 5)
    )
    for row in range(2):
        make_sequence(scheduler, row, range(20), max_tokens=1)
    scheduler.update(answer(next_step(scheduler)))
    second = next_step(scheduler)
    # 18 of 20 tokens are shared; the query at 18 sees from 14 on.
    (scheduled,) = second.scheduled
    assert scheduled.start == 18
    assert [(new.first, len(new.block_ids)) for new in scheduled.new_blocks] == [(0, 10), (7, 3)]
    scheduler.check_integrity()


def longest_prefix(
    cached: dict[int, set[int]], windows: tuple[int | None, ...], num_usable: int, block_size: int
) -> int:
    """By trying every length: blocks of the longest prefix that all groups can continue."""

    def fits(length: int) -> bool:
        position = length * block_size
        return all(
            index in cached[group]
            for group, window in enumerate(windows)
            for seen in range(0 if window is None else max(0, position - window + 1), position)
            for index in [seen // block_size]
        )

    return max(filter(fits, range(num_usable + 1)))


@settings(max_examples=300, deadline=None)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 12)), min_size=1, max_size=3),
    block_size=st.integers(1, 4),
    data=st.data(),
)
def test_a_hit_is_the_longest_prefix_whose_windows_are_cached(
    windows: list[int | None], block_size: int, data: st.DataObject
) -> None:
    num_prompt_tokens = 24
    groups = tuple(windows)
    blocks = KVBlocks(num_blocks=200, block_size=block_size, windows=groups)
    first = Sequence(make_request(0, range(num_prompt_tokens)), num_kv_groups=len(groups))
    assert blocks.admit(first, reserve=0)
    blocks.grow_windows(first, num_prompt_tokens)
    first.num_computed_tokens = num_prompt_tokens
    blocks.register_computed(first)
    blocks.release(first)
    cached = {}
    for group in range(len(groups)):
        found = [
            index
            for index, block_hash in enumerate(first.block_hashes)
            if blocks._is_cached(group, block_hash)
        ]
        gone = data.draw(st.sets(st.sampled_from(found or [0]), max_size=3))
        cached[group] = set(found) - gone
        for index in gone & set(found):
            blocks.allocator._forget(blocks._cached(group, first.block_hashes[index]))
    second = Sequence(make_request(1, range(num_prompt_tokens)), num_kv_groups=len(groups))
    assert blocks.admit(second, reserve=0)
    num_usable = (num_prompt_tokens - 1) // block_size
    expected = longest_prefix(cached, groups, num_usable, block_size)
    assert second.num_computed_tokens == expected * block_size
    for window, table in zip(groups, second.block_tables, strict=True):
        reach = expected * block_size if window is None else window - 1
        assert table.first == max(0, expected * block_size - reach) // block_size
    blocks.check_integrity([second])
