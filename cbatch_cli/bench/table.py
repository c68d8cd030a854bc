"""A benchmark's numbers, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LINES = {
    "output_tokens_per_s": ("output tokens/s", "{:.1f}"),
    "total_tokens_per_s": ("total tokens/s", "{:.1f}"),
    "wall_s": ("wall time, s", "{:.1f}"),
    "tail_s": ("  of it with nothing waiting", "{:.1f}"),
    "steps": ("steps", "{:,.0f}"),
    "step_occupancy": ("step occupancy", "{:.3f}"),
    "step_occupancy_until_tail": ("  while somebody waits", "{:.3f}"),
    "token_occupancy": ("token occupancy", "{:.3f}"),
    "preemptions": ("preemptions", "{:,.0f}"),
}


def bench_table(result: Mapping[str, Any]) -> str:
    """A column for each contender: the median of its runs, and the range where they differ.

    `result` is the object that `--json` prints.
    """
    contenders = result["contenders"]
    rows = [["", *contenders]]
    for name, (label, style) in _LINES.items():
        rows.append([label, *(_cell(found, (name,), style) for found in contenders.values())])
    phases = dict.fromkeys(
        phase for found in contenders.values() for phase in found["median"].get("phase_shares", ())
    )
    if phases:
        rows.append(["share of wall time", *("" for _ in contenders)])
    for phase in sorted(phases, key=lambda phase: (phase == "other", phase)):
        path = ("phase_shares", phase)
        rows.append(
            [f"  {phase}", *(_cell(found, path, "{:.1%}") for found in contenders.values())]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = (
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join([*_heading(result), "", *table, ""])


def _heading(result: Mapping[str, Any]) -> list[str]:
    workload, engine, repeat = result["workload"], result["resolved"]["engine"], result["repeat"]
    runs = f"median of {repeat} runs (lowest - highest)" if repeat > 1 else "one run"
    return [
        f"workload  {workload['name']}: {workload['rows']:,} rows, "
        f"{workload['prompt_tokens']:,} tokens in, "
        f"at most {workload['max_output_tokens']:,} out",
        f"engine    {engine['model']} in {engine['dtype']} on {engine['device']}, "
        f"{engine['max_num_seqs']:,} sequences, {engine['max_num_batched_tokens']:,} tokens a step",
        f"numbers   {runs}",
    ]


def _cell(found: Mapping[str, Any], path: tuple[str, ...], style: str) -> str:
    texts = []
    for kind in ("median", "min", "max"):
        value: Any = found[kind]
        for name in path:
            value = value.get(name) if value is not None else None
        if value is None:
            return "-"
        texts.append(style.format(value))
    middle, lowest, highest = texts
    return middle if lowest == highest else f"{middle} ({lowest} - {highest})"
