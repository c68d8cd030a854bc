"""What a job needs of an engine, in whatever process it runs. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput


class ModelRunner(Protocol):
    """Runs the steps that the scheduler decides on, one after another."""

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        """Compute one step; times go to `stats` by phase."""
        ...


class LaunchedStep(Protocol):
    """A step that its device computes, or has computed."""

    def collect(self, stats: EngineStats) -> StepOutput:
        """Wait for what the step sampled; times go to `stats`."""
        ...


@runtime_checkable
class OverlappingRunner(Protocol):
    """Runs steps beside the CPU, in the order in which they are launched."""

    @property
    def lag(self) -> int:
        """How many steps may be launched before the ids of the one before them are known."""
        ...

    def launch(self, step: SchedulerOutput, stats: EngineStats) -> LaunchedStep:
        """Have a step computed, without waiting; times go to `stats` by phase.

        Steps are collected in the order of their launch; one that is given up never is.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that had been computed when its launch returned."""

    output: StepOutput

    def collect(self, stats: EngineStats) -> StepOutput:
        """What the step sampled."""
        return self.output


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A `ModelRunner` as a runner of which no step is ever in flight."""

    runner: ModelRunner
    lag = 0

    def launch(self, step: SchedulerOutput, stats: EngineStats) -> EndedStep:
        """Compute the step."""
        return EndedStep(self.runner.execute(step, stats))


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
