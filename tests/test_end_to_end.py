"""The command as it is installed, with a real model, read back by the tools that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_data"

pytestmark = pytest.mark.model


def cbatch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("CBATCH_") or key == "CBATCH_CACHE"
    }
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", "cbatch_cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=900,
    )


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The output of the sample prompts with every default, the summary and what stderr said."""
    folder = tmp_path_factory.mktemp("run")
    done = cbatch("run", str(SAMPLES / "prompts.jsonl"), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "prompts.results.parquet"
    ]
    return folder / "prompts.results.parquet", json.loads(done.stdout), done.stderr


def test_every_prompt_has_its_answer(prompts_run: tuple[Path, dict[str, Any], str]) -> None:
    path, summary, _ = prompts_run
    given = read_rows("prompts.jsonl")
    found = pq.read_table(path).to_pylist()
    assert [row["row_index"] for row in found] == list(range(len(given)))
    for asked, row in zip(given, found, strict=True):
        assert {name: row[name] for name in asked if name != "sampling_params"} == {
            name: value for name, value in asked.items() if name != "sampling_params"
        }
        assert row["completion"] and row["error"] is None
        tokens = row["metrics"]["completion_tokens"]
        assert 1 <= tokens <= asked["sampling_params"]["max_tokens"]
        assert (row["finish_reason"] == "length") == (
            tokens == asked["sampling_params"]["max_tokens"]
        )
    assert found[0]["prompt"] == "Paris is the capital of"
    assert found[0]["completion"].startswith(" France")
    assert summary["rows"] == summary["rows_ok"] == len(given)
    assert summary["output"] == "prompts.results.parquet"
    assert summary["output_tokens"] == sum(row["metrics"]["completion_tokens"] for row in found)


def test_pyarrow_duckdb_polars_and_datasets_read_the_same(
    prompts_run: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    path = prompts_run[0]
    wanted = pq.read_table(path).select(["id", "prompt", "completion", "finish_reason"]).to_pylist()

    def same(rows: Sequence[dict[str, Any]]) -> bool:
        return list(rows) == wanted

    columns = "id, prompt, completion, finish_reason"
    with duckdb.connect() as connection:
        query = connection.sql(f"select {columns} from '{path}' order by row_index")
        assert same([dict(zip(query.columns, row, strict=True)) for row in query.fetchall()])
        metrics = f"select sum(metrics.completion_tokens) from '{path}' where error is null"
        assert connection.sql(metrics).fetchall() == [(prompts_run[1]["output_tokens"],)]
    frame = polars.read_parquet(path)
    assert same(frame.select(columns.split(", ")).to_dicts())
    assert frame["metrics"].struct.field("completion_tokens").sum() > 0
    dataset = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path)
    )
    assert same(dataset.select_columns(columns.split(", ")).to_list())


def test_rows_with_errors_make_the_status_4(tmp_path: Path) -> None:
    arguments = ["run", str(SAMPLES / "with_errors.jsonl"), "-o", "out/", "--max-tokens", "2"]
    done = cbatch(*arguments, "--rows-per-part", "3", "--json", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    summary = json.loads(done.stdout)
    assert summary["rows_failed"] == sum(summary["errors"].values()) > 0
    parts = sorted((tmp_path / "out").iterdir())
    assert len(parts) > 1 and all(part.suffix == ".parquet" for part in parts)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert len(rows) == summary["rows"]
    failed = [row for row in rows if row["error"] is not None]
    assert len(failed) == summary["rows_failed"]
    assert {row["error"]["type"] for row in failed} == set(summary["errors"])
    assert all((row["completion"] is None) == (row["error"] is not None) for row in rows)
    again = cbatch(*arguments, "--overwrite", "--allow-errors", "-q", cwd=tmp_path)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_what_cannot_be_run_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = cbatch("run", "absent.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cbatch: error: ") and done.stderr.count("\n") == 1
    assert "absent.jsonl" in done.stderr
