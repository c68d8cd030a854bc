"""One generation while the engine works on it. No torch here."""

from __future__ import annotations

import time
from array import array
from datetime import UTC, datetime, timedelta
from enum import Enum, auto

from cbatch_cli.engine.block_table import BlockTable
from cbatch_cli.errors import RowError
from cbatch_cli.metrics import RequestMetrics, percentile
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput, SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Sequence:
    """Token ids, two counters and a block table for each KV group.

    A sequence needs work while `num_computed_tokens` is behind `num_tokens`: one behind is a
    decode, many behind is a prefill. `num_pending_tokens` counts ids that a step in flight will
    sample: their place is known, their value is not yet.
    """

    __slots__ = (
        "_status",
        "block_hashes",
        "block_tables",
        "error",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "has_new_blocks",
        "inter_token_s",
        "key",
        "last_token_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_held_tokens",
        "num_in_flight_steps",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_settled_tokens",
        "params",
        "passes_block_at",
        "request",
        "slot",
        "submitted_at",
        "token_ids",
    )

    def __init__(self, request: Request, *, num_kv_groups: int = 1) -> None:
        self.request = request
        self.key: RequestKey = request.key
        self.params: SamplingParams = request.params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = [*request.prompt_token_ids, *request.resumed_token_ids]
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_in_flight_steps = 0
        self.num_settled_tokens = 0
        """Tokens computed in steps that have ended: no step in flight begins before these."""
        self.block_tables = [BlockTable() for _ in range(num_kv_groups)]
        self.num_held_tokens = 0
        """Positions from the first on for which every group has, or had, a block."""
        self.has_new_blocks = False
        """Whether the runner has not been told of all of them."""
        self.passes_block_at = 0
        """Settled tokens from which on some window has passed the first block of its group."""
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.slot: int | None = None
        """Row of the runner's per-sequence buffers; kept from admission to preemption or end."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.error: RowError | None = None
        self.submitted_at = time.monotonic()
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self.inter_token_s = array("f")
        self._status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Tokens whose place is known: prompt, output, and those a step in flight samples."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """How far the computed tokens are behind."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Output ids sampled so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self._status is SequenceStatus.FINISHED

    @property
    def status(self) -> SequenceStatus:
        """Where the sequence stands; setting it stamps the times that metrics are made of."""
        return self._status

    @status.setter
    def status(self, status: SequenceStatus) -> None:
        self._status = status
        if status is SequenceStatus.RUNNING and self.first_scheduled_at is None:
            self.first_scheduled_at = time.monotonic()
        elif status is SequenceStatus.PREEMPTED:
            self.num_preemptions += 1
        elif status is SequenceStatus.FINISHED:
            self.finished_at = time.monotonic()

    def append(self, token_id: int) -> None:
        """Add a sampled id and stamp its time."""
        now = time.monotonic()
        if self.last_token_at is None:
            self.first_token_at = now
        else:
            self.inter_token_s.append(now - self.last_token_at)
        self.last_token_at = now
        self.token_ids.append(token_id)

    def metrics(self) -> RequestMetrics:
        """What the sequence has cost; complete once it is finished."""
        submitted, scheduled = self.submitted_at, self.first_scheduled_at
        first, last, end = self.first_token_at, self.last_token_at, self.finished_at
        gaps = self.inter_token_s
        now = datetime.now(UTC)
        since_submission = timedelta(seconds=time.monotonic() - submitted)
        return RequestMetrics(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=len(self.token_ids) - self.num_prompt_tokens,
            preemptions=self.num_preemptions,
            attempt=self.request.attempt,
            queue_s=None if scheduled is None else scheduled - submitted,
            prefill_s=None if first is None or scheduled is None else first - scheduled,
            decode_s=None if first is None or last is None else last - first,
            ttft_s=None if first is None else first - submitted,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else None,
            itl_p99_s=percentile(gaps, 99) if gaps else None,
            e2e_s=None if end is None else end - submitted,
            started_at=now - since_submission,
            finished_at=now,
        )

    def output(self) -> RequestOutput:
        """What the caller gets. Raises `ValueError` before the sequence has ended."""
        if self.finish_reason is None:
            raise ValueError(f"sequence {self.key} has not ended")
        return RequestOutput(
            key=self.key,
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            metrics=self.metrics(),
            error=self.error,
        )
