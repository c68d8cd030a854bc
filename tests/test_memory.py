"""Memory does not grow with the number of rows, and answers begin before the input ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NUM_ROWS = 200_000

CHILD = """
import json, sys
from pathlib import Path
import psutil
from cbatch_cli.config import build_job_config
from cbatch_cli.assembly import EngineLoader
from cbatch_cli.job import run_job
from tests.null_engine import load_null_engine

source, output = sys.argv[1:]
process = psutil.Process()
seen = {"after_5000": None, "peak": 0, "first_at_fraction": None}

def load(model, config, log):
    engine = load_null_engine(model, config)
    generate = engine.client.generate

    def watched(requests):
        for count, answer in enumerate(generate(requests)):
            if count == 0:
                seen["first_at_fraction"] = open_sources[0].fraction_read
            if count == 5000:
                seen["after_5000"] = process.memory_info().rss
            elif count % 2000 == 0 and count > 5000:
                seen["peak"] = max(seen["peak"], process.memory_info().rss)
            yield answer

    engine.client.generate = watched
    return engine

import cbatch_cli.job as job
open_sources = []
real_open = job.open_source
def remember(*args, **kwargs):
    open_sources.append(real_open(*args, **kwargs))
    return open_sources[0]
job.open_source = remember

config = build_job_config(
    {"inputs": (source,), "output": output, "max_tokens": 2, "max_num_seqs": 64}
)
seen["rows"] = run_job(config, loader=EngineLoader(identify=str, load=load))["rows_ok"]
print(json.dumps(seen))
"""


def test_memory_is_flat_and_the_first_answer_is_early(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for row in range(NUM_ROWS):
            file.write(json.dumps({"id": row, "prompt": f"Question {row}: " + "why " * 20}) + "\n")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(tmp_path / "out.parquet")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen["rows"] == NUM_ROWS
    assert seen["first_at_fraction"] < 0.5
    growth = (seen["peak"] - seen["after_5000"]) / 2**20
    print(f"memory grew by {growth:.0f} MiB after the first 5,000 of {NUM_ROWS:,} rows")
    assert growth < 100
