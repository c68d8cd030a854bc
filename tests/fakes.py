"""A model without weights for tests of everything around the model.

What it caches for a token depends on all tokens before it, as in a real model, and its next token
is a function of all that it reads back through the block tables: a block that two sequences own,
one shared by different prefixes, a stale one or a lost one changes the answer. In a KV group with a
window it reads what the window shows and nothing else.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cbatch_cli.engine.admission import AdmissionPolicy
from cbatch_cli.engine.block_allocator import BlockAllocator
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from cbatch_cli.request import Request, RequestKey, SamplingParams

VOCAB_SIZE = 97


POISON = -1
"""In place of what nobody may read."""


def cached_value(token_id: int, group: int, seen: Iterable[int]) -> int:
    """What a KV group caches for a token whose query has read these values."""
    return zlib.crc32(array("q", [group, token_id, *seen]).tobytes())


def next_token(seen: Iterable[int]) -> int:
    """The id that follows a token which sees these cached values, its own among them."""
    return zlib.crc32(array("q", seen).tobytes()) % VOCAB_SIZE


def positions_before(window: int | None, position: int) -> range:
    """What the query of a token reads of a group; without a window only its predecessor."""
    reach = 2 if window is None else window
    return range(max(0, position - reach + 1), position)


def visible_positions(window: int | None, position: int) -> range:
    """All that a token sees, itself included."""
    return range(0 if window is None else max(0, position - window + 1), position + 1)


def expected_output(
    request: Request,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    max_sequence_tokens: int,
    windows: Sequence[int | None] = (None,),
) -> tuple[int, ...]:
    """What the fake model answers to a request that runs alone."""
    params = request.params
    cached: list[list[int]] = [[] for _ in windows]
    output: list[int] = []
    unread = list(request.prompt_token_ids)
    while True:
        for token_id in unread:
            position = len(cached[0])
            seen = [
                values[p]
                for window, values in zip(windows, cached, strict=True)
                for p in positions_before(window, position)
            ]
            for group, values in enumerate(cached):
                values.append(cached_value(token_id, group, seen))
        last = len(cached[0]) - 1
        unread = [
            next_token(
                values[p]
                for window, values in zip(windows, cached, strict=True)
                for p in visible_positions(window, last)
            )
        ]
        output += unread
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        if (
            output[-1] in stops
            or len(output) >= params.max_tokens
            or len(request.prompt_token_ids) + len(output) >= max_sequence_tokens
        ):
            return tuple(output)


def poison_blocks(allocator: BlockAllocator, poison: Callable[[list[int]], None]) -> None:
    """Have `poison` called with blocks that are handed out, and with freed ones nobody can share.

    A block counts as freed at once, even if steps that were scheduled before have not run.
    """
    allocate, free = allocator.allocate, allocator.free

    def poisoning_allocate(count: int) -> list[int]:
        block_ids = allocate(count)
        poison(block_ids)
        return block_ids

    def poisoning_free(block_ids: Sequence[int]) -> None:
        free(block_ids)
        known = allocator._hash_by_block
        poison([b for b in block_ids if allocator.is_free(b) and b not in known])

    allocator.allocate = poisoning_allocate  # type: ignore[method-assign]
    allocator.free = poisoning_free  # type: ignore[method-assign]


class FakeRunner:
    """Executes steps over a paged cache whose blocks all KV groups share."""

    def __init__(
        self, *, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.cache = [POISON] * (num_blocks * block_size)
        self.tables: dict[int, list[dict[int, int]]] = {}
        """By slot and group: block ids by index. Those given up stay, as in a real runner."""
        self.last_token: dict[int, int] = {}
        self.steps: list[SchedulerOutput] = []

    def watch(self, allocator: BlockAllocator) -> None:
        """Poison blocks from now on, as `poison_blocks` says."""

        def poison(block_ids: Iterable[int]) -> None:
            for block_id in block_ids:
                start = block_id * self.block_size
                self.cache[start : start + self.block_size] = [POISON] * self.block_size

        poison_blocks(allocator, poison)

    def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
        """Write all tokens, then sample from what the block tables say."""
        self.steps.append(step)
        for scheduled in step.scheduled:
            tables = self._extend_tables(scheduled)
            token_ids = scheduled.token_ids
            if len(token_ids) < scheduled.num_tokens:
                token_ids = (*token_ids, self.last_token[scheduled.slot])
            assert len(token_ids) == scheduled.num_tokens
            for position, token_id in enumerate(token_ids, start=scheduled.start):
                seen = self._read(tables, positions_before, position)
                for group, table in enumerate(tables):
                    self.cache[self._cell(table, position)] = cached_value(token_id, group, seen)
        sampled: dict[RequestKey, tuple[int, ...]] = {}
        for scheduled in step.scheduled:
            if scheduled.samples:
                last = scheduled.start + scheduled.num_tokens - 1
                tables = self.tables[scheduled.slot]
                token_id = next_token(self._read(tables, visible_positions, last))
                self.last_token[scheduled.slot] = token_id
                sampled[scheduled.key] = (token_id,)
        return StepOutput(step_id=step.step_id, token_ids=sampled)

    def _extend_tables(self, scheduled: ScheduledSequence) -> list[dict[int, int]]:
        if scheduled.joined is not None:
            self.tables[scheduled.slot] = [{} for _ in self.windows]
        tables = self.tables[scheduled.slot]
        for table, new in zip(tables, scheduled.new_blocks, strict=bool(scheduled.new_blocks)):
            table.update(enumerate(new.block_ids, start=new.first))
        return tables

    def _read(
        self,
        tables: Sequence[Mapping[int, int]],
        positions: Callable[[int | None, int], range],
        position: int,
    ) -> list[int]:
        values = [
            self.cache[self._cell(table, p)]
            for window, table in zip(self.windows, tables, strict=True)
            for p in positions(window, position)
        ]
        assert POISON not in values, "a block is read before it was written or after it was freed"
        return values

    def _cell(self, table: Mapping[int, int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 10_000,
    prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = frozenset(),
    policy: AdmissionPolicy | None = None,
    windows: tuple[int | None, ...] = (None,),
) -> Scheduler:
    """A scheduler over fresh blocks."""
    return Scheduler(
        blocks=KVBlocks(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            prefix_caching=prefix_caching,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        policy=policy,
    )


def make_request(row: int, prompt: Sequence[int], **params: object) -> Request:
    """A greedy request."""
    return Request(
        key=RequestKey(row),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


class LateRunner(FakeRunner):
    """Computes a step no earlier than its results are asked for, `lag` launches later."""

    def __init__(
        self, *, lag: int, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, windows=windows)
        self.lag = lag
        self.num_launched_early = 0
        """Steps that were launched while another one was in flight."""
        self._queue: deque[LateStep] = deque()

    def launch(self, step: SchedulerOutput, stats: EngineStats) -> LateStep:
        """Queue a step."""
        self.num_launched_early += bool(self._queue)
        launched = LateStep(self, step)
        self._queue.append(launched)
        return launched

    def run_until(self, wanted: LateStep) -> StepOutput:
        """Compute steps in order up to the one wanted."""
        while (launched := self._queue.popleft()) is not wanted:
            self._scribble(launched.step)
        return self.execute(wanted.step)

    def _scribble(self, step: SchedulerOutput) -> None:
        """What a step that was given up does all the same: write where it was to write."""
        for scheduled in step.scheduled:
            tables = self._extend_tables(scheduled)
            for position in range(scheduled.start, scheduled.start + scheduled.num_tokens):
                for table in tables:
                    self.cache[self._cell(table, position)] = POISON
            self.last_token[scheduled.slot] = POISON


@dataclass
class LateStep:
    """A step that waits in the queue of a `LateRunner`."""

    runner: LateRunner
    step: SchedulerOutput

    def collect(self, stats: EngineStats) -> StepOutput:
        """Compute the step now."""
        return self.runner.run_until(self)
