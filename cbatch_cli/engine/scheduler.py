"""Decides step by step which tokens are computed. No torch here.

There are no phases. A sequence is some tokens behind; a step hands out one token budget. Everybody
who runs gets one token, so a decode never waits for somebody's prefill; what is left goes to those
who are further behind, in order of arrival, so a long prompt is cut into chunks and none starves.

`schedule` may be called again before `update` has brought the previous step's ids: tokens are
counted before they are known, blocks go back only when no step in flight can write to them, and an
id sampled for a sequence that has meanwhile ended is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cbatch_cli.engine.admission import AdmissionPolicy, ContinuousAdmission
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.sequence import Sequence, SequenceStatus
from cbatch_cli.engine.step import (
    JoinedSequence,
    ScheduledSequence,
    SchedulerOutput,
    StepOutput,
)
from cbatch_cli.errors import RowError, RowErrorType
from cbatch_cli.request import FinishReason, RequestKey


class Scheduler:
    """Keeps the running set full within `max_num_seqs`, the token budget and the KV blocks.

    `eos_token_ids` end a sequence unless it ignores them; no sequence grows beyond
    `max_model_len` tokens or the whole KV pool.
    """

    def __init__(
        self,
        *,
        blocks: KVBlocks,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        policy: AdmissionPolicy | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_sequence_tokens = min(max_model_len, blocks.capacity_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission: the last is the youngest, which is preempted first."""
        self.input_open = False
        """Whether more sequences may still be added; static admission waits for a full batch."""
        self._eos_token_ids = eos_token_ids
        self._policy = policy or ContinuousAdmission()
        self._sequences: dict[RequestKey, Sequence] = {}
        self._retiring: dict[int, list[Sequence]] = {}
        """Ended or preempted sequences by the step after which their blocks can go back."""
        self._free_slots = list(range(self.max_num_seqs))[::-1]
        self._last_step_id = -1
        self._in_flight: dict[int, list[tuple[Sequence, ScheduledSequence]]] = {}
        """By step: who takes part, and with what."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_surplus_tokens = 0
        """Ids sampled for sequences that had ended before they came back."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence still has to end."""
        return bool(self.waiting or self.running)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose ids have not come back."""
        return len(self._in_flight)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `ValueError` for a key in use or when no token can be added."""
        if sequence.key in self._sequences:
            raise ValueError(f"a request with key {tuple(sequence.key)} is in the engine already")
        if self._reached_length(sequence, sequence.num_tokens):
            raise ValueError(
                f"{sequence.num_tokens} tokens leave no room for another in "
                f"{self.max_sequence_tokens}, of which {sequence.params.max_tokens} may be output"
            )
        self._sequences[sequence.key] = sequence
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when no token can be computed now."""
        preempted = self._grow_running()
        joined = set() if preempted else self._admit()
        chunks = self._hand_out_budget()
        if not chunks:
            return None
        self._last_step_id += 1
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        scheduled = tuple(
            self._commit(sequence, num_tokens, joined=sequence.key in joined)
            for sequence, num_tokens in chunks
        )
        self._in_flight[self._last_step_id] = [
            (sequence, entry) for (sequence, _), entry in zip(chunks, scheduled, strict=True)
        ]
        return SchedulerOutput(
            step_id=self._last_step_id,
            scheduled=scheduled,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            preempted=tuple(sequence.key for sequence in preempted),
        )

    def update(self, step: StepOutput) -> list[Sequence]:
        """Take in what a step sampled; returns the sequences that ended by it.

        Steps come back in the order in which they were scheduled.
        """
        ended = []
        for sequence, scheduled in self._in_flight.pop(step.step_id):
            sequence.num_in_flight_steps -= 1
            if sequence.is_finished:
                self.num_surplus_tokens += len(step.token_ids.get(sequence.key, ()))
                continue
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_settled_tokens = scheduled.start + scheduled.num_tokens
                self.blocks.release_passed(sequence)
            if sequence.key in step.failed:
                sequence.error = RowError(RowErrorType.ENGINE_ERROR, step.failed[sequence.key])
                self._end(sequence, FinishReason.ERROR)
                ended.append(sequence)
            elif scheduled.samples:
                sequence.num_pending_tokens -= 1
                if self._append(sequence, step.token_ids[sequence.key]):
                    ended.append(sequence)
        for sequence in self._retiring.pop(step.step_id, ()):
            self.blocks.release(sequence)
        return ended

    def finish(
        self,
        key: RequestKey,
        keep_n: int | None,
        reason: FinishReason,
        *,
        error: RowError | None = None,
    ) -> Sequence | None:
        """End a sequence from outside, keeping its first `keep_n` output ids (None: all).

        Returns it, or None where it has ended already: then what it made is only trimmed later.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return None
        if keep_n is not None:
            del sequence.token_ids[sequence.num_prompt_tokens + keep_n :]
        sequence.error = error
        self._end(sequence, reason)
        return sequence

    def abandon(self) -> None:
        """Undo the steps in flight, one of which failed: whoever took part is computed again.

        Nothing that they may have written is shared, and nothing that was shared before either.
        """
        for taking_part in self._in_flight.values():
            for sequence, scheduled in taking_part:
                sequence.num_in_flight_steps -= 1
                if not sequence.is_finished:
                    sequence.num_pending_tokens -= scheduled.samples
        self._in_flight.clear()
        self.blocks.forget_all()
        for sequences in self._retiring.values():
            for sequence in sequences:
                self.blocks.release(sequence)
        self._retiring.clear()
        for sequence in self.running[::-1]:
            self._preempt(sequence)

    def limit_tokens(self, max_num_batched_tokens: int) -> None:
        """Change the token budget of the steps to come, while nothing runs or to more."""
        self.max_num_batched_tokens = max_num_batched_tokens

    def has_stop_strings(self, key: RequestKey) -> bool:
        """Whether the sequence is alive and may end by a stop string."""
        sequence = self._sequences.get(key)
        return sequence is not None and bool(sequence.params.stop)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless blocks, slots and queues agree with each other."""
        retiring = [s for group in self._retiring.values() for s in group]
        self.blocks.check_integrity([*self.running, *retiring])
        assert self._retiring.keys() <= self._in_flight.keys(), (
            "blocks wait for a step that is not in flight"
        )
        slots = [s.slot for s in self.running] + self._free_slots
        assert len(slots) == self.max_num_seqs and set(slots) == set(range(self.max_num_seqs)), (
            f"slots lost or shared: {slots}"
        )
        queued = [*self.waiting, *self.running]
        assert {s.key for s in queued} == set(self._sequences) and len(queued) == len(
            self._sequences
        ), "a sequence is lost or queued twice"

    # -- one step ------------------------------------------------------------------------------

    def _grow_running(self) -> list[Sequence]:
        """Make room for the next token of everyone who runs; returns those preempted for it."""
        preempted: list[Sequence] = []
        for sequence in list(self.running):
            if self.blocks.has_room(sequence):
                continue
            while sequence.status is SequenceStatus.RUNNING and not self.blocks.grow(sequence):
                if self._retiring or any(map(self.blocks.num_returning, self.running)):
                    # Blocks are on their way back: sit this step out, and let nobody younger
                    # take them.
                    return preempted
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _admit(self) -> set[RequestKey]:
        """Move waiting sequences into free slots while memory lasts; returns their keys."""
        joined: set[RequestKey] = set()
        limit = self._policy.admission_limit(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            input_open=self.input_open,
        )
        limit = min(limit, self.max_num_batched_tokens - len(self.running))
        reserve: int | None = None
        while self.waiting and self._free_slots and len(joined) < limit:
            sequence = self.waiting[0]
            if sequence.num_in_flight_steps:
                break  # preempted with a step in flight: its last id and old blocks come back first
            if reserve is None:
                reserve = sum(map(self.blocks.headroom, self.running))
            if not self.blocks.admit(sequence, reserve=reserve):
                break
            reserve += self.blocks.headroom(sequence)
            self.waiting.popleft()
            if sequence.status is SequenceStatus.PREEMPTED:
                self.num_recomputed_tokens -= sequence.num_computed_tokens
            else:
                sequence.num_cached_tokens = min(
                    sequence.num_computed_tokens, sequence.num_prompt_tokens
                )
            sequence.slot = self._free_slots.pop()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            joined.add(sequence.key)
        return joined

    def _hand_out_budget(self) -> list[tuple[Sequence, int]]:
        """One token for everybody, the rest to those behind in order of arrival."""
        has_room = [s for s in self.running if self.blocks.has_room(s)]
        is_short = len(has_room) < len(self.running)
        # Who has all its tokens is certain to end once the steps in flight have.
        ready = [s for s in has_room if not self._reached_length(s, s.num_tokens)]
        spare = self.max_num_batched_tokens - len(ready)
        chunks = []
        for sequence in ready:
            extra = min(sequence.num_uncomputed_tokens - 1, spare)
            if extra:
                if not is_short:
                    self.blocks.grow_windows(sequence, 1 + extra)
                extra = min(extra, self.blocks.num_computable_tokens(sequence) - 1)
            spare -= extra
            chunks.append((sequence, 1 + extra))
        return chunks

    def _commit(self, sequence: Sequence, num_tokens: int, *, joined: bool) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        samples = num_tokens == sequence.num_uncomputed_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.num_in_flight_steps += 1
        self.blocks.register_computed(sequence)
        scheduled = ScheduledSequence(
            key=sequence.key,
            slot=sequence.slot,  # type: ignore[arg-type]
            start=start,
            num_tokens=num_tokens,
            token_ids=tuple(sequence.token_ids[start : start + num_tokens]),
            new_blocks=self.blocks.take_new_blocks(sequence),
            samples=samples,
            joined=JoinedSequence(
                params=sequence.params, num_prompt_tokens=sequence.num_prompt_tokens
            )
            if joined
            else None,
        )
        sequence.num_pending_tokens += samples
        return scheduled

    # -- how sequences end or step back --------------------------------------------------------

    def _append(self, sequence: Sequence, token_ids: Iterable[int]) -> bool:
        """Add sampled ids until one of them ends the sequence; returns whether one did."""
        params = sequence.params
        for token_id in token_ids:
            sequence.append(token_id)
            is_eos = token_id in self._eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                self._end(sequence, FinishReason.STOP)
            elif self._reached_length(sequence, len(sequence.token_ids)):
                self._end(sequence, FinishReason.LENGTH)
            else:
                continue
            return True
        return False

    def _reached_length(self, sequence: Sequence, num_tokens: int) -> bool:
        return (
            num_tokens - sequence.num_prompt_tokens >= sequence.params.max_tokens
            or num_tokens >= self.max_sequence_tokens
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; it will be computed again, before any newcomer."""
        self._leave_running(sequence)
        self.num_preemptions += 1
        self.num_recomputed_tokens += sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_settled_tokens = 0
        sequence.status = SequenceStatus.PREEMPTED
        self.waiting.appendleft(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_running(sequence)
        else:
            self.waiting.remove(sequence)
        del self._sequences[sequence.key]
        sequence.num_pending_tokens = 0
        sequence.finish_reason = reason
        sequence.status = SequenceStatus.FINISHED

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)  # type: ignore[arg-type]
        sequence.slot = None
        if sequence.num_in_flight_steps:
            self._retiring.setdefault(self._last_step_id, []).append(sequence)
        else:
            self.blocks.release(sequence)
