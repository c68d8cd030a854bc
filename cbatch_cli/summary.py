"""The end of a run, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary_text(summary: Mapping[str, Any]) -> str:
    """A few lines that say where the answers are and what they cost.

    `summary` is the object that `--json` prints.
    """
    made = ", in the run that made them" if summary.get("already_done") else ""
    lines = {
        "answers": summary["output"],
        "rows": f"{summary['rows']:,}: {summary['rows_ok']:,} ok, {_failures(summary)}",
        "tokens": f"{summary['prompt_tokens']:,} in, {summary['output_tokens']:,} out",
        "speed": f"{summary['output_tokens_per_s']:,.1f} tokens/s out, "
        f"{summary['total_tokens_per_s']:,.1f} in and out{made}",
        "time": f"{summary['wall_s']:.1f} s, and {summary['load_s']:.1f} s to load the model{made}",
    }
    return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def _failures(summary: Mapping[str, Any]) -> str:
    by_type = ", ".join(f"{count:,} {name}" for name, count in summary["errors"].items())
    return f"{summary['rows_failed']:,} failed" + (f" ({by_type})" if by_type else "")
