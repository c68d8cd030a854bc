"""A model without weights for tests of everything around the model.

What it caches for a token depends on all tokens before it, as in a real model, and its next token
is a function of all that it reads back through the block table: a block that two sequences own, one
shared by different prefixes, a stale one or a lost one changes the answer.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from cbatch_cli.engine.admission import AdmissionPolicy
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.request import Request, RequestKey, SamplingParams

VOCAB_SIZE = 97


def cached_value(token_id: int, previous: int) -> int:
    """What the cache holds for a token that follows one whose cached value is `previous`."""
    return zlib.crc32(token_id.to_bytes(8, "little"), previous)


def next_token(cached: Sequence[int]) -> int:
    """The id that follows a prefix with these cached values."""
    return zlib.crc32(array("q", cached).tobytes()) % VOCAB_SIZE


def expected_output(
    request: Request, *, eos_token_ids: frozenset[int] = frozenset(), max_sequence_tokens: int
) -> tuple[int, ...]:
    """What the fake model answers to a request that runs alone."""
    params = request.params
    cached: list[int] = []
    output: list[int] = []
    unread = list(request.prompt_token_ids)
    while True:
        for token_id in unread:
            cached.append(cached_value(token_id, cached[-1] if cached else 0))
        unread = [next_token(cached)]
        output += unread
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        if (
            output[-1] in stops
            or len(output) >= params.max_tokens
            or len(request.prompt_token_ids) + len(output) >= max_sequence_tokens
        ):
            return tuple(output)


class FakeRunner:
    """Executes steps over a paged cache."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = [-1] * (num_blocks * block_size)
        self.tables: dict[int, list[int]] = {}
        self.last_token: dict[int, int] = {}
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput, stats: EngineStats | None = None) -> StepOutput:
        """Write all tokens, then sample from what the block tables say."""
        self.steps.append(step)
        for scheduled in step.scheduled:
            if scheduled.joined is not None:
                self.tables[scheduled.slot] = []
            table = self.tables[scheduled.slot]
            table += scheduled.new_block_ids[0]
            token_ids = scheduled.token_ids
            if len(token_ids) < scheduled.num_tokens:
                token_ids = (*token_ids, self.last_token[scheduled.slot])
            assert len(token_ids) == scheduled.num_tokens
            start = scheduled.start
            previous = self.cache[self._cell(table, start - 1)] if start else 0
            for position, token_id in enumerate(token_ids, start=start):
                previous = cached_value(token_id, previous)
                self.cache[self._cell(table, position)] = previous
        sampled: dict[RequestKey, tuple[int, ...]] = {}
        for scheduled in step.scheduled:
            if scheduled.samples:
                end = scheduled.start + scheduled.num_tokens
                table = self.tables[scheduled.slot]
                token_id = next_token([self.cache[self._cell(table, p)] for p in range(end)])
                self.last_token[scheduled.slot] = token_id
                sampled[scheduled.key] = (token_id,)
        return StepOutput(step_id=step.step_id, token_ids=sampled)

    def _cell(self, table: list[int], position: int) -> int:
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
) -> Scheduler:
    """A scheduler over fresh blocks."""
    return Scheduler(
        blocks=KVBlocks(
            num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching
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
