"""Suites of measurements: the table, the JSON, and which of them runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cbatch_cli.bench import suite
from cbatch_cli.bench.suite import Log, Measurement, Section, SuiteSettings, run_suite, suite_table
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig

SETTINGS = SuiteSettings(engine=EngineConfig(), model="org/model", repeat=2)


def measured(settings: SuiteSettings, log: Log) -> Iterator[Section]:
    log(f"measuring {settings.model}")
    yield Section(
        title="Speed",
        measurements=[
            Measurement(name="copy", value=4321.4, unit="GB/s"),
            Measurement(name="attention", value=0.7, unit="%", target=0.75),
            Measurement(name="idle", value=0.02, unit="%", target=0.03, at_most=True),
            Measurement(name="fp8", value=None, unit="%", target=0.5, note="the card has none"),
        ],
    )


def test_the_numbers_and_which_targets_they_miss() -> None:
    lines: list[str] = []
    result = run_suite("gpu", SETTINGS, lines.append, measure=measured)
    assert lines[0] == "measuring org/model" and lines[1].startswith("Speed: measured after ")
    (section,) = result["sections"]
    assert [entry["is_met"] for entry in section["measurements"]] == [None, False, True, None]
    assert json.loads(json.dumps(result)) == result
    assert suite_table({**result, "wall_s": 1.5, "cbatch_version": "1"}) == (
        "suite gpu, cbatch 1, 1.5 s\n"
        "\n"
        "Speed\n"
        "  copy       4,321 GB/s\n"
        "  attention       70.0%  (at least 75.0%, missed)\n"
        "  idle             2.0%  (at most 3.0%)\n"
        "  fp8                 -  (at least 50.0%) the card has none\n"
    )


def test_the_command_prints_the_table_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cbatch_cli.bench.gpu_suite.measure", measured)
    path = tmp_path / "suite.json"
    assert main(["bench", "--suite", "gpu", "-m", "org/m", "--json-file", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("suite gpu, ") and err.startswith("measuring org/m\n")
    result = json.loads(path.read_text())
    assert out == suite_table(result)
    assert main(["bench", "--suite", "gpu", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["sections"] == result["sections"] and err == ""
    missing = tmp_path / "none" / "suite.json"
    assert main(["bench", "--suite", "gpu", "--json-file", str(missing)]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_every_suite_has_a_module() -> None:
    assert set(suite.SUITES) == set(suite._MODULES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_suite_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "gpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("needs a GPU, and torch finds none on this machine\n")
    assert err.count("\n") == 1
