"""The summary of a job that was run in shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_SUMMED = (
    "rows",
    "rows_ok",
    "rows_failed",
    "rows_resumed",
    "wall_s",
    "load_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "steps",
    "preemptions",
    "recomputed_tokens",
)


def merged_summary(summaries: Sequence[Mapping[str, Any]], *, output: str) -> dict[str, Any]:
    """Counts and seconds of all shards together, and rates over those seconds.

    Whether shards ran side by side or one after another is not known, so a rate is that of one
    machine. What cannot be added up (percentiles, occupancy) is in the shards' own summaries.
    """
    summed = {name: sum(summary[name] for summary in summaries) for name in _SUMMED}
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in summed.items()
    }
    errors = sum((Counter(summary["errors"]) for summary in summaries), Counter())
    num_tokens = summed["prompt_tokens"] + summed["output_tokens"]
    busy_s = sum(_busy_s(summary) for summary in summaries)
    return {
        **rounded,
        "errors": dict(errors),
        "output_tokens_per_s": _rate(summed["output_tokens"], busy_s),
        "total_tokens_per_s": _rate(num_tokens, busy_s),
        "prefix_hit_rate": _rate(summed["cached_tokens"], summed["prompt_tokens"]),
        "output": output,
        "resolved": summaries[0]["resolved"],
    }


def _busy_s(summary: Mapping[str, Any]) -> float:
    """Seconds in which the engine of a shard ran."""
    num_tokens = summary["prompt_tokens"] + summary["output_tokens"]
    rate: float = summary["total_tokens_per_s"]
    return num_tokens / rate if rate else 0.0


def _rate(count: float, per: float) -> float:
    return round(count / per, 4) if per else 0.0
