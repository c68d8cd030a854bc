"""The checklist for a GPU goes on after what fails, and loses nothing that was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.checklist import ROOT, Part, parts, run_parts, suite_rows


def python(name: str, code: str, *, limit_s: float = 60) -> Part:
    return Part(name=name, command=[sys.executable, "-c", code], limit_s=limit_s)


def test_parts_that_fail_hold_up_no_other(tmp_path: Path) -> None:
    given = [
        python("first", "print('out'); raise SystemExit(3)"),
        python("second", "import time; print('begun', flush=True); time.sleep(60)", limit_s=2),
        python("third", "import sys; print('err', file=sys.stderr)"),
    ]
    outcomes = list(run_parts(given, tmp_path))
    assert [(outcome.name, outcome.result) for outcome in outcomes] == [
        ("first", "failed, exit status 3"),
        ("second", "not done in 2 s"),
        ("third", "passed"),
    ]
    logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert logs == {"first.log": "out\n", "second.log": "begun\n", "third.log": "err\n"}


def test_every_file_of_tests_is_run_in_a_quarter_of_an_hour(tmp_path: Path) -> None:
    commands = [" ".join(part.command) for part in parts(tmp_path)]
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert sum(f"tests/gpu/{path.name}" in command for command in commands) == 1
    assert sum(part.limit_s for part in parts(tmp_path)) < 14 * 60


def test_the_rows_for_the_page_of_benchmarks() -> None:
    copy = {"name": "copy", "value": 4321.4, "unit": "GB/s", "target": None, "note": ""}
    idle = {"name": "idle", "value": 0.05, "unit": "%", "target": 0.03, "note": ""}
    sections = [
        {
            "title": "Speed",
            "measurements": [
                {**copy, "at_most": False, "is_met": None},
                {**idle, "at_most": True, "is_met": False},
            ],
        }
    ]
    assert suite_rows({"sections": sections}) == (
        "| | measured | target |\n"
        "| --- | --- | --- |\n"
        "| **Speed** | | |\n"
        "| copy | 4,321 GB/s |  |\n"
        "| idle | 5.0% | (at most 3.0%, missed) |\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.checklist", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "torch finds none" in done.stderr
    assert not list(tmp_path.iterdir())
