"""Times and counts of one row and of one run. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """What one row cost. Durations in seconds, `None` where the row never got that far.

    Where a row was preempted, `decode_s` includes the wait and the recomputation.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    attempt: int = 1
    queue_s: float | None = None
    """From submission to the first step that computes a token of the row."""
    prefill_s: float | None = None
    """From that step to the first output token."""
    decode_s: float | None = None
    """From the first output token to the last."""
    ttft_s: float | None = None
    """From submission to the first output token."""
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    e2e_s: float | None = None
    started_at: datetime | None = None
    """UTC time of submission."""
    finished_at: datetime | None = None
    worker: str = ""


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) by linear interpolation; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100.0
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p90 and p99 of a set of durations in seconds; `None` where the set is empty."""

    p50: float | None
    p90: float | None
    p99: float | None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON."""
        return asdict(self)


class DurationHistogram:
    """Durations in bins of equal ratio, so that a run of any length takes constant memory.

    A percentile is off by at most 2.5 % of its value.
    """

    _GROWTH = 1.05
    _SMALLEST_S = 1e-6

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, duration_s: float) -> None:
        """Count one duration in seconds."""
        ratio = max(duration_s, self._SMALLEST_S) / self._SMALLEST_S
        self._counts[int(math.log(ratio) / math.log(self._GROWTH))] += 1

    def percentiles(self) -> Percentiles:
        """Summarise what was counted."""
        return Percentiles(*(self._percentile(q) for q in (0.50, 0.90, 0.99)))

    def _percentile(self, q: float) -> float | None:
        remaining = q * self._counts.total()
        for index in sorted(self._counts):
            remaining -= self._counts[index]
            if remaining <= 0:
                middle = self._SMALLEST_S * self._GROWTH ** (index + 0.5)
                return float(f"{middle:.4g}")
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """Where a run stands; what the progress display draws. `None` means not known yet."""

    elapsed_s: float
    """Since generation began; the model's load is apart."""
    rows_done: int
    rows_failed: int
    rows_total: int | None
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of KV blocks in use, 0..1."""
    prompt_tokens: int
    output_tokens: int
    eta_s: float | None
