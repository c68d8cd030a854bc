"""Suites of measurements on one machine: named numbers, as a table and as JSON.

A suite is a module with a function `measure(settings, log)` that yields sections as they are
measured. It is loaded when it is asked for, and looks at nothing but its settings.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cbatch_cli import __version__
from cbatch_cli.bench.config import BenchConfig
from cbatch_cli.config import EngineConfig

SuiteName = Literal["cpu", "gpu"]

SUITES: tuple[SuiteName, ...] = get_args(SuiteName)
_MODULES: dict[SuiteName, str] = {
    "cpu": "cbatch_cli.bench.cpu_suite",
    "gpu": "cbatch_cli.bench.gpu_suite",
}

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteSettings:
    """What the command line says about a suite."""

    engine: EngineConfig
    """Of the engines that the suite builds; the suite sets what it varies."""
    model: str
    """The model of suites that measure one by name."""
    repeat: int
    """How often an engine's run is measured; the median counts."""
    rows: BenchConfig | None = None
    """Names the rows, for suites that run those of a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One number."""

    name: str
    value: float | None
    """None if it could not be measured; then `note` says why."""
    unit: str = ""
    """As it is printed behind the number; `%` stands for a share 0..1."""
    target: float | None = None
    """What the value should reach, where there is a promise."""
    at_most: bool = False
    """Whether the target must not be passed, rather than reached."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the value is on the right side of its target; None without value or target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Measurements that belong together."""

    title: str
    measurements: Sequence[Measurement]


Measure = Callable[[SuiteSettings, Log], Iterator[Section]]


def run_suite(
    name: SuiteName,
    settings: SuiteSettings,
    log: Log,
    *,
    measure: Measure | None = None,
    keep: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure the suite of that name; what `suite_table` shows and `--json` prints.

    `measure` is the suite's own unless given. `keep` is called after each section with the result
    so far, since a suite takes minutes and may be ended: `complete` is false in all but the last.
    Raises `UsageError` where the machine
    lacks what the suite measures.
    """
    measure = measure or importlib.import_module(_MODULES[name]).measure
    start = time.monotonic()
    result: dict[str, Any] = {
        "cbatch_version": __version__,
        "suite": name,
        "complete": False,
        "sections": [],
        "wall_s": 0.0,
    }
    for section in measure(settings, log):
        result["wall_s"] = round(time.monotonic() - start, 1)
        log(f"{section.title}: measured after {result['wall_s']:.0f} s")
        result["sections"].append(
            {
                "title": section.title,
                "measurements": [
                    {**dataclasses.asdict(entry), "is_met": entry.is_met}
                    for entry in section.measurements
                ],
            }
        )
        if keep is not None:
            keep(result)
    result["complete"] = True
    if keep is not None:
        keep(result)
    return result


def suite_table(result: Mapping[str, Any]) -> str:
    """The numbers of `run_suite` for people: a line each, under the title of its section."""
    rows = [
        (entry["name"], number_text(entry), verdict_text(entry))
        for section in result["sections"]
        for entry in section["measurements"]
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"suite {result['suite']}, cbatch {result['cbatch_version']}, {result['wall_s']} s"]
    remaining = iter(rows)
    for section in result["sections"]:
        lines += ["", section["title"]]
        for _ in section["measurements"]:
            name, number, verdict = next(remaining)
            lines.append(f"  {name:<{widths[0]}}  {number:>{widths[1]}}  {verdict}".rstrip())
    return "\n".join([*lines, ""])


def number_text(entry: Mapping[str, Any]) -> str:
    """The value of a measurement with its unit."""
    if entry["value"] is None:
        return "-"
    return _with_unit(entry["value"], entry["unit"])


def _with_unit(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    digits = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return f"{digits} {unit}".rstrip()


def verdict_text(entry: Mapping[str, Any]) -> str:
    """The target of a measurement, if it was missed, and its note."""
    parts = []
    if entry["target"] is not None:
        side = "at most" if entry["at_most"] else "at least"
        missed = "" if entry["is_met"] is not False else ", missed"
        parts.append(f"({side} {_with_unit(entry['target'], entry['unit'])}{missed})")
    return " ".join([*parts, entry["note"]]).strip()
