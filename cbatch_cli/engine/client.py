"""What a job needs of an engine, in whatever process it runs. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput


class ModelRunner(Protocol):
    """Runs the steps that the scheduler decides on."""

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        """Compute one step; times go to `stats` by phase."""
        ...


class TokenListener(Protocol):
    """Told of new ids as they are sampled; may call `EngineClient.finish`."""

    def __call__(self, token_ids: Mapping[RequestKey, tuple[int, ...]]) -> None:
        """`token_ids` holds the new ids of every sequence that has stop strings."""
        ...


class EngineClient(Protocol):
    """Requests in, outputs out in the order in which they finish."""

    token_listener: TokenListener | None
    """Called on the engine's thread after each step."""

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens, prompt and output together, that one sequence can hold."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counts so far; may be read from any thread."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request; thread-safe, never blocks."""
        ...

    def finish(self, key: RequestKey, keep_n: int | None, reason: FinishReason) -> None:
        """End a generation before the next step, keeping `keep_n` output ids; thread-safe."""
        ...

    def stop(self) -> None:
        """Let `generate` end soon, with what is unfinished as cancelled; thread-safe."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Run `requests`, pulled lazily, and yield each output as it finishes."""
        ...
