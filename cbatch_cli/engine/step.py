"""The messages between scheduler and model runner. No torch here; all of it can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cbatch_cli.request import RequestKey, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSequence:
    """What the runner must know of a sequence from the step on in which it (re)joins."""

    params: SamplingParams
    num_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NewBlocks:
    """Blocks that a sequence was given in one KV group."""

    first: int
    """Index of the first of them in the sequence's block table."""
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledSequence:
    """The tokens that one sequence computes in one step."""

    key: RequestKey
    slot: int
    """Row of the runner's per-sequence buffers."""
    start: int
    """Position of the first token computed."""
    num_tokens: int
    token_ids: tuple[int, ...]
    """Ids from `start` on; one short where the last is still being sampled by a step in flight."""
    new_blocks: tuple[NewBlocks, ...]
    """Per KV group those added since the last step, or nothing where there are none; all that it
    holds when the sequence joins."""
    samples: bool
    """Whether the tokens catch up, so that the next one is sampled."""
    joined: JoinedSequence | None = None
    num_draft_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. Sequences with a single token come first."""

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    num_running: int
    num_waiting: int
    preempted: tuple[RequestKey, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step sampled: ids for every sequence that samples, usually one each."""

    step_id: int
    token_ids: Mapping[RequestKey, tuple[int, ...]]
    failed: Mapping[RequestKey, str] = field(default_factory=dict)
    """Sequences whose logits were unusable, and what is wrong with them."""
