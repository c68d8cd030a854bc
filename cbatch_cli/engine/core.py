"""The loop: take in requests, schedule, execute, hand out what has finished. No torch here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from cbatch_cli.engine.client import (
    LaunchedStep,
    ModelRunner,
    OneByOne,
    OverlappingRunner,
    TokenListener,
)
from cbatch_cli.engine.inbox import FinishCall, Inbox
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.engine.sequence import Sequence
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.engine.token_limit import TokenLimit
from cbatch_cli.engine.watchdog import Watchdog
from cbatch_cli.errors import (
    CBatchError,
    DeviceMemoryError,
    EngineError,
    RowError,
    RowErrorType,
)
from cbatch_cli.request import (
    FinishReason,
    Request,
    RequestKey,
    RequestOutput,
    check_length,
    check_stop_token_ids,
)


class EngineCore:
    """Continuous batching over a `Scheduler` and a `ModelRunner`; sees token ids only.

    One thread runs `generate`; `submit` and `finish` may be called from any. A request that cannot
    run comes back as an output with an error, also one with ids beyond `vocab_size`. A step longer
    than `step_timeout_s` ends the process.

    With a runner that overlaps, the next step is scheduled and launched before the ids of the one
    that runs are known: a sequence is found to have ended one step late, and what was sampled for
    it meanwhile is dropped.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner | OverlappingRunner,
        token_listener: TokenListener | None = None,
        step_timeout_s: float = math.inf,
        vocab_size: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._vocab_size = vocab_size
        self._step_timeout_s = step_timeout_s
        self.token_listener = token_listener
        self.stats = EngineStats(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        self._runner: OverlappingRunner = (
            runner if isinstance(runner, OverlappingRunner) else OneByOne(runner)
        )
        self._in_flight: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
        self._inbox = Inbox(
            window=2 * scheduler.max_num_seqs,  # enough to fill every slot anew
            num_waiting=lambda: len(scheduler.waiting),
        )
        self._is_stopping = False
        self._token_limit = TokenLimit(scheduler)
        self._step_started_at: float | None = None
        """Monotonic time since which the runner has been launching or collecting a step."""

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens, prompt and output together, that one sequence can hold."""
        return self.scheduler.max_sequence_tokens

    def submit(self, request: Request) -> None:
        """Queue a request for the `generate` that runs, or the next; thread-safe, never blocks."""
        self._inbox.put(request)

    def finish(self, key: RequestKey, keep_n: int | None, reason: FinishReason) -> None:
        """End a generation before the next step, keeping `keep_n` output ids; thread-safe."""
        self._inbox.finish(FinishCall(key, keep_n, reason))

    def stop(self) -> None:
        """Let `generate` end after the step that runs; thread-safe, safe in a signal handler.

        What is unfinished comes out with the ids it has and `FinishReason.CANCELLED`.
        """
        # No lock: a signal handler may interrupt the thread that holds it.
        self._is_stopping = True

    def generate(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Run `requests` and yield each output as it finishes.

        The iterable is pulled on a thread of its own and only while the window has room, so it may
        be endless, and slow without holding up a step. Its exceptions are raised here.
        """
        self._is_stopping = False
        self._inbox.feed(requests)
        watchdog = Watchdog(
            timeout_s=self._step_timeout_s,
            step_started_at=lambda: self._step_started_at,
            describe=self._describe,
        )
        try:
            with watchdog:
                yield from self._outputs()
        except BaseException:
            deque(self._cancel_all(), maxlen=0)
            raise
        finally:
            self._inbox.close()

    def _outputs(self) -> Iterator[RequestOutput]:
        """Step until the input is closed and every request has ended, yielding as they end."""
        while True:
            yield from self._take_in()
            if self._is_stopping:
                yield from self._collect_all()
                yield from self._cancel_all()
                return
            if self.scheduler.has_unfinished or self._in_flight:
                yield from self._step()
                continue
            with self.stats.phase("wait_for_input"):
                may_come = self._inbox.wait()
            if not may_come:
                break
        if self._inbox.feed_error is not None:
            raise self._inbox.feed_error

    def _cancel_all(self) -> Iterator[RequestOutput]:
        self._inbox.close()
        deque(self._take_in(), maxlen=0)
        self._abandon()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            ended = self.scheduler.finish(sequence.key, None, FinishReason.CANCELLED)
            if ended is not None:
                yield self._hand_out(ended)

    def _take_in(self) -> Iterator[RequestOutput]:
        requests, finish_calls, self.scheduler.input_open = self._inbox.take()
        for request in requests:
            sequence = Sequence(request, num_kv_groups=len(self.scheduler.blocks.windows))
            sequence.error = self._refusal(request)
            if sequence.error is None:
                self.scheduler.add(sequence)
            else:
                sequence.finish_reason = FinishReason.ERROR
                yield sequence.output()
        for key, keep_n, reason in finish_calls:
            ended = self.scheduler.finish(key, keep_n, reason)
            if ended is not None:
                yield self._hand_out(ended)
        if requests or finish_calls:
            self._inbox.made_room()  # without a step, if all were refused

    def _refusal(self, request: Request) -> RowError | None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            return RowError(RowErrorType.EMPTY_PROMPT, "the prompt has no tokens")
        if self._vocab_size is not None:
            if error := check_stop_token_ids(request.params, self._vocab_size):
                return error
            prompt_ids = request.prompt_token_ids
            if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
                return RowError(
                    RowErrorType.BAD_TYPE,
                    f"the prompt has ids outside of the model's {self._vocab_size} tokens",
                )
        scheduler = self.scheduler
        return check_length(
            num_prompt_tokens, scheduler.max_model_len, scheduler.blocks.capacity_tokens
        )

    def _step(self) -> Iterator[RequestOutput]:
        stats, scheduler = self.stats, self.scheduler
        with stats.phase("schedule"):
            step = scheduler.schedule()
        if step is None:
            if self._in_flight:
                yield from self._collect()
            else:
                self._wait_for_admission()
            return
        self._inbox.made_room()  # admission did
        stats.start_step(step, kv_cache_usage=scheduler.blocks.usage)
        try:
            with self._watched():
                launched = self._runner.launch(step, stats)
        except DeviceMemoryError as error:
            yield from self._retry_smaller(step, error)
            return
        except BaseException as error:
            self._fail(step, error)
        self._in_flight.append((step, launched))
        while len(self._in_flight) > self._runner.lag:
            yield from self._collect()

    def _collect(self) -> Iterator[RequestOutput]:
        """Take in what the oldest step in flight has sampled."""
        stats, scheduler = self.stats, self.scheduler
        step, launched = self._in_flight[0]
        try:
            with self._watched():
                sampled = launched.collect(stats)
        except DeviceMemoryError as error:
            self._in_flight.clear()
            yield from self._retry_smaller(step, error)
            return
        except BaseException as error:
            self._fail(step, error)
        self._in_flight.popleft()
        self._token_limit.step_succeeded()
        with stats.phase("update"):
            num_surplus = scheduler.num_surplus_tokens
            ended = scheduler.update(sampled)
            num_surplus = scheduler.num_surplus_tokens - num_surplus
            stats.num_preemptions = scheduler.num_preemptions
            stats.num_recomputed_tokens = scheduler.num_recomputed_tokens
            stats.end_step(num_sampled=sum(map(len, sampled.token_ids.values())) - num_surplus)
            self._tell_listener(sampled)
        for sequence in ended:
            yield self._hand_out(sequence)

    def _collect_all(self) -> Iterator[RequestOutput]:
        while self._in_flight:
            yield from self._collect()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Have the watchdog count the time of a block that may wait for the device."""
        self._step_started_at = time.monotonic()
        try:
            yield
        finally:
            self._step_started_at = None

    def _fail(self, step: SchedulerOutput, error: BaseException) -> NoReturn:
        self._abandon()
        if isinstance(error, CBatchError) or not isinstance(error, Exception):
            raise error
        raise EngineError(f"step {step.step_id} failed: {error}") from error

    def _abandon(self) -> None:
        """Give the steps in flight up: what runs next must not wait for them."""
        self._in_flight.clear()
        if self.scheduler.num_in_flight:
            self.scheduler.abandon()

    def _retry_smaller(
        self, step: SchedulerOutput, error: DeviceMemoryError
    ) -> Iterator[RequestOutput]:
        """Take a step back that did not fit; a sequence for which no step is small enough fails."""
        yield from self._collect_all()
        if not self.scheduler.num_in_flight:
            return  # a step before this one did not fit either, and both were taken back
        self._abandon()
        if step.num_tokens > 1:
            self._token_limit.step_failed(step.num_tokens)
            return
        ended = self.scheduler.finish(
            step.scheduled[0].key,
            None,
            FinishReason.ERROR,
            error=RowError(RowErrorType.OUT_OF_MEMORY, f"not even one token fits: {error}"),
        )
        if ended is not None:
            yield self._hand_out(ended)

    def _wait_for_admission(self) -> None:
        """Static admission waits for a full batch; nothing else leaves a step empty."""
        if self.scheduler.input_open:
            with self.stats.phase("wait_for_input"):
                self._inbox.wait()

    def _describe(self) -> str:
        return (
            f"step {self.stats.num_steps - 1}, {len(self.scheduler.running)} running, "
            f"{len(self.scheduler.waiting)} waiting, "
            f"{self.scheduler.blocks.usage:.0%} of the KV cache in use, "
            f"{self.stats.num_output_tokens} tokens made"
        )

    def _tell_listener(self, sampled: StepOutput) -> None:
        if self.token_listener is None:
            return
        watched = {
            key: token_ids
            for key, token_ids in sampled.token_ids.items()
            if self.scheduler.has_stop_strings(key)
        }
        if watched:
            self.token_listener(watched)

    def _hand_out(self, sequence: Sequence) -> RequestOutput:
        self.stats.add_finished(sequence)
        return sequence.output()
