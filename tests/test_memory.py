"""Memory does not grow with the number of rows, and answers begin before the input ends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_ROWS = 200_000
SETTLED = 50_000
"""Rows after which queues, caches and the allocators' own reserves are as large as they get."""

CHILD = """
import json, sys
from pathlib import Path
import psutil
from cbatch_cli.config import build_job_config
from cbatch_cli.assembly import EngineLoader
from cbatch_cli.job import run_job
from tests.null_engine import load_null_engine

source, output, settled = sys.argv[1:]
process = psutil.Process()
seen = {"after_5000": 0, "early_peak": 0, "late_peak": 0, "first_at_fraction": None}

def load(model, config, log):
    engine = load_null_engine(model, config)
    generate = engine.client.generate

    def watched(requests):
        for count, answer in enumerate(generate(requests)):
            if count == 0:
                seen["first_at_fraction"] = open_sources[0].fraction_read
            if count == 5000:
                seen["after_5000"] = process.memory_info().rss
            elif count % 2000 == 0:
                when = "early_peak" if count <= int(settled) else "late_peak"
                seen[when] = max(seen[when], process.memory_info().rss)
            yield answer

    engine.client.generate = watched
    return engine

import cbatch_cli.job as job
open_sources = []
real_open = job.open_job_input
def remember(*args, **kwargs):
    source, prompt = real_open(*args, **kwargs)
    open_sources.append(source)
    return source, prompt
job.open_job_input = remember

config = build_job_config(
    {"inputs": (source,), "output": output, "max_tokens": 2, "max_num_seqs": 64}
)
seen["rows"] = run_job(config, loader=EngineLoader(identify=str, load=load))["rows_ok"]
print(json.dumps(seen))
"""


def test_memory_is_flat_and_the_first_answer_is_early(tmp_path: Path) -> None:
    seen = run_watched(tmp_path, num_rows=NUM_ROWS, row_bytes=120)
    assert seen["first_at_fraction"] < 0.5


@pytest.mark.slow
def test_memory_is_flat_over_ten_gigabytes(tmp_path: Path) -> None:
    run_watched(tmp_path, num_rows=2_500_000, row_bytes=4_000)


def run_watched(folder: Path, *, num_rows: int, row_bytes: int) -> dict[str, Any]:
    """A job in a process of its own; what it saw of itself, which must not have grown."""
    source = folder / "in.jsonl"
    words = "".join(random.Random(0).choices("etaoin shrdlu", k=2 * row_bytes))
    with source.open("w") as file:
        for row in range(num_rows):
            start = row * 7919 % row_bytes
            pad = words[start : start + row_bytes - 80]
            file.write(json.dumps({"id": row, "prompt": f"Question {row}: why?", "pad": pad}))
            file.write("\n")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(folder / "out.parquet"), str(SETTLED)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=6 * 3600,
    )
    assert child.returncode == 0, child.stderr
    seen: dict[str, Any] = json.loads(child.stdout)
    assert seen["rows"] == num_rows
    settling = (seen["early_peak"] - seen["after_5000"]) / 2**20
    growth = (seen["late_peak"] - seen["early_peak"]) / 2**20
    size = source.stat().st_size / 1e9
    print(
        f"memory grew by {settling:.0f} MiB from 5,000 to {SETTLED:,} rows and by {growth:.0f} MiB "
        f"from there to {num_rows:,}, {size:.2f} GB"
    )
    assert settling < 160
    assert growth < 32
    return seen
