"""Jobs that share an input: each runs its rows, into an output of its own, and can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.config import build_job_config
from cbatch_cli.data import durable_io
from cbatch_cli.data.jsonl_source import JsonlSource
from cbatch_cli.data.parquet_source import ParquetSource
from cbatch_cli.dry_run import describe_job
from cbatch_cli.errors import OutputError, ResumeMismatchError, UsageError
from cbatch_cli.job import run_job
from cbatch_cli.metrics import RunSnapshot
from tests.null_engine import NULL_LOADER, null_answer

ROWS_PER_PART = 4


def write_rows(folder: Path, num_rows: int, *, bad: int = 7) -> Path:
    """Prompts, of which every `bad`-th is empty."""
    path = folder / "in.jsonl"
    rows = [{"id": i, "prompt": f"p{i}" if i % bad else ""} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path, output: str, shard: str | None, **options: Any) -> dict[str, Any]:
    hooks = {name: options.pop(name) for name in ("on_progress", "log") if name in options}
    config = build_job_config(
        {
            "inputs": (str(source),),
            "output": output,
            "shard": shard,
            "rows_per_part": ROWS_PER_PART,
            "max_tokens": 3,
            **options,
        }
    )
    return run_job(config, loader=NULL_LOADER, **hooks)


def answers(path: Path) -> dict[int, str | None]:
    table = pq.read_table(path)
    columns = [table.column(name).to_pylist() for name in ("row_index", "completion")]
    return dict(zip(*columns, strict=True))


def expected(num_rows: int, index: int, count: int, *, bad: int = 7) -> dict[int, str | None]:
    own = [i for i in range(num_rows) if (i // ROWS_PER_PART) % count == index]
    return {i: null_answer(i, f"p{i}", 3) if i % bad else None for i in own}


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 23, 24, 25])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
def test_each_row_is_answered_by_its_shard(
    tmp_path: Path, num_rows: int, count: int, kind: str
) -> None:
    source = write_rows(tmp_path, num_rows)
    for index in range(count):
        summary = run(source, f"{tmp_path}/{kind}", f"{index}/{count}", prompt_column="prompt")
        name = f"out.shard-{index:05d}-of-{count:05d}"
        path = tmp_path / (name if kind.endswith("/") else f"{name}.parquet")
        wanted = expected(num_rows, index, count)
        assert answers(path) == wanted
        assert list(answers(path)) == sorted(wanted)
        assert summary["rows"] == len(wanted)
        assert summary["rows_failed"] == list(wanted.values()).count(None)
        assert summary["output"] == str(path)
        assert summary["shard"] == {"index": index, "count": count, "rows_of_input": num_rows}
    assert not (tmp_path / "out.parquet").exists() and not (tmp_path / "out").exists()


def test_a_job_of_all_rows_says_nothing_of_shards(tmp_path: Path) -> None:
    source = write_rows(tmp_path, 9)
    assert "shard" not in run(source, f"{tmp_path}/out.parquet", None)


def watch_skipped_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass over a source that can skip rows has skipped."""
    skipped: list[int] = []
    for source in (JsonlSource, ParquetSource):

        def rows(self: Any, prompt: Any, *, rows: Any = source.rows, **options: Any) -> Any:
            skipped.append(options["num_skipped"])
            return rows(self, prompt, **options)

        monkeypatch.setattr(source, "rows", rows)
    return skipped


@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "csv"])
def test_an_interrupted_shard_is_resumed(
    tmp_path: Path, kind: str, index: int, file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path, 100)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    if file_format == "parquet":
        source = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=5)
    elif file_format == "csv":
        source = tmp_path / "in.csv"
        lines = [f"{row['id']},{row['prompt']}\n" for row in rows]
        source.write_text("id,prompt\n" + "".join(lines))

    def die(step: str, path: Path) -> None:
        if step == "before rename" and path.name == f"part-{12 + index:05d}.parquet":
            raise OSError("stopped")

    monkeypatch.setattr(durable_io, "on_step", die)
    with pytest.raises(OutputError):
        run(source, f"{tmp_path}/{kind}", f"{index}/3")
    monkeypatch.undo()
    skipped = watch_skipped_rows(monkeypatch)
    summary = run(source, f"{tmp_path}/{kind}", f"{index}/3")
    assert summary["rows_resumed"] >= 4 * ROWS_PER_PART
    # Up to the end of part 9 + index, the last that was done, nothing is read again.
    assert skipped == ([] if file_format == "csv" else [(10 + index) * ROWS_PER_PART])
    name = f"out.shard-{index:05d}-of-00003"
    path = tmp_path / (name if kind.endswith("/") else f"{name}.parquet")
    assert answers(path) == expected(100, index, 3)
    assert summary["rows"] == len(expected(100, index, 3))
    assert summary["shard"]["rows_of_input"] == 100


def test_a_shard_is_part_of_what_the_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path, 30)
    run(source, f"{tmp_path}/out.parquet", "0/2")
    one = tmp_path / "out.shard-00000-of-00002.parquet"
    run_file = tmp_path / f"{one.name}.cbatch" / "run.json"
    values = json.loads(run_file.read_text())
    values["fingerprint"]["shard"] = "1/2"
    run_file.write_text(json.dumps(values))
    with pytest.raises(ResumeMismatchError, match="different job: shard changed"):
        run(source, f"{tmp_path}/out.parquet", "0/2")


@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
def test_the_failed_rows_of_a_shard_are_run_again(tmp_path: Path, kind: str) -> None:
    source = write_rows(tmp_path, 60)
    output = f"{tmp_path}/{kind}"
    assert run(source, output, "1/3")["rows_failed"] == 3
    logged: list[str] = []
    summary = run(source, output, "1/3", retry_errors=True, log=logged.append)
    assert summary["rows"] == 20 and summary["rows_failed"] == 3
    assert summary["rows_resumed"] == 17
    assert not any("nothing to run" in line for line in logged)


def test_the_failed_rows_of_a_shard_have_a_file_of_their_own(tmp_path: Path) -> None:
    source = write_rows(tmp_path, 24, bad=5)
    for index in range(2):
        run(source, f"{tmp_path}/out.parquet", f"{index}/2", errors_file=f"{tmp_path}/e.jsonl")
        lines = (tmp_path / f"e.shard-{index:05d}-of-00002.jsonl").read_text().splitlines()
        found = [json.loads(line)["id"] for line in lines]
        wanted = expected(24, index, 2, bad=5)
        assert found == [row for row, answer in wanted.items() if answer is None]


def test_the_limit_is_one_of_the_input(tmp_path: Path) -> None:
    source = write_rows(tmp_path, 30)
    summary = run(source, f"{tmp_path}/out.parquet", "1/2", limit=14)
    assert summary["rows"] == 6
    assert answers(Path(summary["output"])) == expected(14, 1, 2)


def test_progress_counts_the_rows_of_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["p"] * 22}), path)
    snapshots: list[RunSnapshot] = []
    run(path, f"{tmp_path}/out.parquet", "1/2", on_progress=snapshots.append)
    assert (snapshots[-1].rows_done, snapshots[-1].rows_total) == (10, 10)


def test_a_task_of_a_job_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path, 30)
    for name, value in {"ID": "3", "MIN": "1", "MAX": "3", "COUNT": "3"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert run(source, f"{tmp_path}/all.parquet", None)["rows"] == 30
    summary = run(source, f"{tmp_path}/out.parquet", "slurm")
    assert answers(Path(summary["output"])) == expected(30, 2, 3)
    assert summary["output"].endswith("out.shard-00002-of-00003.parquet")
    config = build_job_config({"inputs": (str(source),), "output": "out.parquet", "shard": "slurm"})
    assert describe_job(config)["output"] == "out.shard-00002-of-00003.parquet"


def test_a_shard_does_not_replace_an_input(tmp_path: Path) -> None:
    path = tmp_path / "out.shard-00000-of-00002.parquet"
    pq.write_table(pa.table({"prompt": ["p"]}), path)
    with pytest.raises(UsageError, match="would replace the input"):
        run(path, f"{tmp_path}/out.parquet", "0/2")
