"""Finds the settings that are fastest on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from cbatch_cli.bench.suite import Log
from cbatch_cli.cpu_defaults import BUILT_IN, CHOICES, CPUDefaults
from cbatch_cli.request import Request, RequestKey

CLEARLY_FASTER = 1.05
"""Times on a busy machine vary: less above the built-in settings is no reason to leave them."""
LEAST_ROUNDS = 2
"""One round decides nothing."""
NUM_ROWS = 2 * max(CHOICES["max_num_seqs"])
"""With fewer rows, how a run ends would decide, not how it goes while it is full."""

_Runs = dict[CPUDefaults, list[float]]
"""Tokens per second of every round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepLimits:
    """How long it may take."""

    num_rounds: int
    """What wins must do so in two rounds at least."""
    seconds_per_round: float = 100.0

    @property
    def seconds(self) -> float:
        """No round is begun that would end later."""
        return self.num_rounds * self.seconds_per_round


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What was measured: medians of tokens per second, in and out."""

    rates: Mapping[CPUDefaults, float]
    best: CPUDefaults
    speedup: float
    """Of `best` over the built-in settings."""
    num_rounds: int
    """Rounds of the built-in settings and one change each."""


def alternatives(fixed: Collection[str]) -> list[CPUDefaults]:
    """The built-in settings with one of them changed, but none in `fixed`.

    Threads are not varied: torch takes one for each core, fewer lose by far, and whoever shares
    the machine says so by OMP_NUM_THREADS.
    """
    return [
        dataclasses.replace(BUILT_IN, **{name: value})
        for name, values in CHOICES.items()
        for value in values
        if name not in fixed and value != getattr(BUILT_IN, name)
    ]


def sweep(
    candidates: Sequence[CPUDefaults],
    measure: Callable[[CPUDefaults], float],
    limits: SweepLimits,
    log: Log,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Sweep:
    """Measure the built-in settings and `candidates` in turn, then what won of these together.

    `measure` gives tokens per second. Who wins does so in every round, and by more than
    `CLEARLY_FASTER` in the median.
    """
    end = clock() + limits.seconds

    def measure_all(contenders: Sequence[CPUDefaults]) -> _Runs:
        runs: _Runs = {contender: [] for contender in contenders}
        round_s = 0.0
        for number in range(1, limits.num_rounds + 1):
            start = clock()
            if start + round_s > end:
                break
            for contender in contenders:
                runs[contender].append(measure(contender))
            round_s = clock() - start
            log(f"sweep: round {number} of {limits.num_rounds} took {round_s:.0f} s")
        return runs

    runs = measure_all([BUILT_IN, *candidates])
    best, speedup = _best(runs)
    together = _together(runs)
    if together not in (BUILT_IN, best):
        again = measure_all([BUILT_IN, best, together])
        if len(again[together]) >= LEAST_ROUNDS:
            best, speedup = _best(again)
            runs[together] = again[together]
    return Sweep(
        rates={contender: median(rates) for contender, rates in runs.items() if rates},
        best=best,
        speedup=speedup,
        num_rounds=len(runs[BUILT_IN]),
    )


def repeated(requests: Sequence[Request], num_rows: int = NUM_ROWS) -> list[Request]:
    """At least `num_rows` rows: these over and over, with numbers of their own."""
    again = itertools.islice(itertools.cycle(requests), max(num_rows, len(requests)))
    return [dataclasses.replace(request, key=RequestKey(row)) for row, request in enumerate(again)]


def cut_short(requests: Sequence[Request], share: float) -> list[Request]:
    """The same rows with that share of the prompt and of the longest answer of each, at least 1."""
    if share >= 1.0:
        return list(requests)
    return [
        dataclasses.replace(
            request,
            prompt_token_ids=request.prompt_token_ids[
                : math.ceil(share * len(request.prompt_token_ids))
            ],
            params=request.params.override(
                {"max_tokens": math.ceil(share * request.params.max_tokens), "min_tokens": 0}
            ),
        )
        for request in requests
    ]


def _clear_speedup(runs: _Runs, candidate: CPUDefaults) -> float | None:
    """Over the built-in settings, the median of rounds; None where it is not clear."""
    pairs = zip(runs[candidate], runs[BUILT_IN], strict=True)
    ratios = [rate / built_in for rate, built_in in pairs]
    if len(ratios) < LEAST_ROUNDS or min(ratios) <= 1.0 or median(ratios) <= CLEARLY_FASTER:
        return None
    return median(ratios)


def _best(runs: _Runs) -> tuple[CPUDefaults, float]:
    """Who wins clearly and by most, else the built-in settings."""
    best, speedup = BUILT_IN, 1.0
    for candidate in runs:
        gain = _clear_speedup(runs, candidate)
        if gain is not None and gain > speedup:
            best, speedup = candidate, gain
    return best, speedup


def _together(runs: _Runs) -> CPUDefaults:
    """All changes that won clearly, of each setting the best."""
    speedups = {candidate: _clear_speedup(runs, candidate) for candidate in runs}
    clear = {candidate: gain for candidate, gain in speedups.items() if gain is not None}
    changes: dict[str, int] = {}
    for candidate in sorted(clear, key=clear.__getitem__):
        changes |= {
            name: value
            for name, value in dataclasses.asdict(candidate).items()
            if value != getattr(BUILT_IN, name)
        }
    return dataclasses.replace(BUILT_IN, **changes)
