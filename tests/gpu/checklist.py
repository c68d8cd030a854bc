"""Everything that needs a GPU, with one command, for whoever has one for a quarter of an hour.

    python -m tests.gpu.checklist FOLDER

first tests kernels, recorded steps and the engine, then measures, and says in the end what came of
each. `FOLDER` gets the output of every part as it comes, `gpu.json`, to which each section of the
suite is written once it is measured, and `gpu.md`, the rows for BENCHMARKS.md. A part that fails or
takes longer than its limit holds up no other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch_cli.bench.suite import number_text, verdict_text

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A command, and how long it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a part."""

    name: str
    result: str
    """`passed`, or why not."""
    seconds: float

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.name:<10} {self.result:<24} {self.seconds:6.0f} s"


def parts(folder: Path) -> list[Part]:
    """In order: what is quick and what the others rest on comes first. 13 minutes at most."""
    python = sys.executable

    def tests(name: str, file: str, limit_s: float) -> Part:
        report = f"--junitxml={folder / name}.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "--durations=5",
            report,
            f"tests/gpu/{file}",
        ]
        return Part(name=name, command=command, limit_s=limit_s)

    cbatch = [python, "-m", "cbatch_cli"]
    suite = [*cbatch, "bench", "--suite", "gpu", "--json-file", str(folder / "gpu.json")]
    return [
        Part(name="doctor", command=[*cbatch, "doctor", "--json"], limit_s=30),
        tests("kernels", "test_gpu_kernels.py", 90),
        tests("graphs", "test_graphs.py", 90),
        tests("engine", "test_gpu_engine.py", 90),
        Part(name="suite", command=suite, limit_s=480),
    ]


def run_parts(given: Sequence[Part], folder: Path) -> Iterator[Outcome]:
    """Run each part with its output in `folder`, and tell what came of it."""
    for part in given:
        start = time.monotonic()
        with (folder / f"{part.name}.log").open("w") as log:
            try:
                done = subprocess.run(
                    part.command, cwd=ROOT, stdout=log, stderr=log, timeout=part.limit_s
                )
                result = f"failed, exit status {done.returncode}" if done.returncode else "passed"
            except subprocess.TimeoutExpired:
                result = f"not done in {part.limit_s:.0f} s"
        yield Outcome(name=part.name, result=result, seconds=time.monotonic() - start)


def suite_rows(result: Mapping[str, Any]) -> str:
    """The numbers of a suite's JSON as a table in Markdown."""
    lines = ["| | measured | target |", "| --- | --- | --- |"]
    for section in result["sections"]:
        lines.append(f"| **{section['title']}** | | |")
        for entry in section["measurements"]:
            lines.append(f"| {entry['name']} | {number_text(entry)} | {verdict_text(entry)} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run all parts; 0 if all passed."""
    import torch

    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("this checklist needs a GPU, and torch finds none on this machine", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for outcome in run_parts(parts(folder), folder):
        print(outcome.line, flush=True)
        outcomes.append(outcome)
    result = folder / "gpu.json"
    if result.exists():
        rows = suite_rows(json.loads(result.read_text()))
        (folder / "gpu.md").write_text(rows, encoding="utf-8")
        print(f"\n{rows}")
    return int(any(outcome.result != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
