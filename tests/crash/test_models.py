"""Real engines, killed and resumed through the command line: the answers are as if they had not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch_cli.data.journal_replay import replay
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.part_info import find_parts
from tests.crash.fork_server import ROOT
from tests.resuming import content
from tests.tiny_models import tiny_llama

WAIT_S = 300


def command(source: Path, output: Path, *options: str) -> list[str]:
    run = [sys.executable, "-m", "cbatch_cli", "run", str(source), "-o", str(output), "-q"]
    return [*run, "--rows-per-part", "20", *options]


def count_done(target: OutputTarget) -> int:
    """Rows that a run would find finished; asked while no run is there."""
    rows = {row for part in find_parts(target).values() for row in part.rows}
    return len(rows | replay(target.work_dir).results.keys())


def run_until_first_row(
    arguments: list[str], target: OutputTarget, *, after_s: float, signal_number: signal.Signals
) -> int:
    """Run until `after_s` behind the first row that is finished, or the end; the exit code."""
    known = journal_size(target)
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and journal_size(target) <= known:
        assert time.monotonic() < deadline, "no row was finished"
        known = min(known, journal_size(target))
        time.sleep(0.02)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal_number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, -signal_number, 128 + signal_number), errors
    return process.returncode


def journal_size(target: OutputTarget) -> int:
    """Bytes of records in all segments; shrinks when parts are done."""
    sizes = []
    for path in target.work_dir.glob("journal-*.bin"):
        try:
            sizes.append(path.stat().st_size - len(b"cbatch-journal-1\n"))
        except FileNotFoundError:
            continue
    return sum(sizes)


def kill_until_done(
    arguments: list[str], target: OutputTarget, *, signals: list[signal.Signals], after_s: float
) -> list[int]:
    """Stop each run by the next of the signals, the last of them again and again, until one ends.

    Returns how many rows were done after each.
    """
    done = [0]
    while True:
        number = signals[min(len(done), len(signals)) - 1]
        code = run_until_first_row(arguments, target, after_s=after_s, signal_number=number)
        if code == 0:
            return done
        done.append(count_done(target))
        assert done[-1] > done[-2], "an attempt has made no progress"


def test_a_seeded_run_of_a_tiny_model_is_not_changed_by_kills(
    tmp_path: Path, tally: Callable[[str], None]
) -> None:
    model = tiny_llama(tmp_path / "model")
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": f"question {i}: " + "why " * (i % 7)} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["-m", str(model), "--max-tokens", "24", "--temperature", "1", "--seed", "7"]
    options += ["--dtype", "float32", "--max-num-seqs", "4", "--ignore-eos"]
    whole = tmp_path / "whole.parquet"
    subprocess.run(command(source, whole, *options), cwd=ROOT, check=True, timeout=WAIT_S)

    target = OutputTarget(path=tmp_path / "out.parquet", is_directory=False)
    signals = [signal.SIGKILL, signal.SIGTERM] * 2 + [signal.SIGKILL]
    arguments = command(source, target.path, *options)
    done = []
    for number in signals:
        code = run_until_first_row(arguments, target, after_s=0.1, signal_number=number)
        if code == 0:
            break
        done.append(count_done(target))
    tally(f"kills of a tiny model: {len(done)}, rows done after each: {done}")
    subprocess.run(arguments, cwd=ROOT, check=True, timeout=WAIT_S)

    assert len(done) >= 3 and done == sorted(set(done))
    assert content(target.path) == content(whole)
    assert os.listdir(target.work_dir) == ["run.json"]


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_makes_progress_between_kills(
    tmp_path: Path, tally: Callable[[str], None]
) -> None:
    source = tmp_path / "in.jsonl"
    subjects = ["rain", "bread", "ships", "bees", "clocks", "salt", "maps", "glass"]
    rows = [{"prompt": f"Fact {i} about {subjects[i % 8]}:"} for i in range(96)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--max-tokens", "48", "--temperature", "0", "--max-num-seqs", "8"]
    whole = tmp_path / "whole.parquet"
    subprocess.run(command(source, whole, *options), cwd=ROOT, check=True, timeout=3600)

    target = OutputTarget(path=tmp_path / "out.parquet", is_directory=False)
    arguments = command(source, target.path, *options)
    done = kill_until_done(arguments, target, signals=[signal.SIGKILL], after_s=3.0)
    tally(f"kills of the demo model: {len(done) - 1}, rows done after each: {done[1:]}")
    assert len(done) > 2
    assert content(target.path) == content(whole)
