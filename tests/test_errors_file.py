"""The failed rows of a run as a file that can be run again."""

from __future__ import annotations

import base64
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.config import build_job_config
from cbatch_cli.data import durable_io, errors_file
from cbatch_cli.errors import OutputError, UsageError
from cbatch_cli.job import run_job
from tests.null_engine import NULL_LOADER

LONG = "x" * 5000  # beyond the null engine's context


class Run:
    """A job over `in.jsonl` in a folder of its own, with the lines that it logs."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "in.jsonl"
        self.output = folder / "out.parquet"
        self.errors = folder / "errors.jsonl"
        self.logged: list[str] = []

    def __call__(self, **options: Any) -> dict[str, Any]:
        config = build_job_config(
            {
                "inputs": (str(self.source),),
                "output": str(self.output),
                "errors_file": str(self.errors),
                "max_tokens": 2,
                **options,
            }
        )
        return run_job(config, loader=NULL_LOADER, log=self.logged.append)

    def write(self, rows: list[Any]) -> None:
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.source.write_text("".join(f"{text}\n" for text in texts))

    def failed(self) -> list[Any]:
        return [json.loads(line) for line in self.errors.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_failed_rows_as_they_were(run: Run) -> None:
    rows: list[Any] = [
        {"id": 0, "prompt": "fine"},
        {"id": 1, "prompt": "", "n": 12345678901234567890123, "deep": {"é": [1.5, None, True]}},
        "no json",
        {"id": 3, "prompt": LONG, "sampling_params": {"max_tokens": 1}},
        '["no object"]',
        {"id": 5, "prompt": "fine"},
        {"id": 6, "other": "no prompt"},
    ]
    run.write(rows)
    run()
    assert run.failed() == [rows[1], rows[3], rows[6]]
    assert run.logged[-1] == (
        f"3 failed rows are in {run.errors}, to be run again; "
        "2 more could not be read as rows and cannot be"
    )


@pytest.mark.parametrize("options", [{"columns": "none"}, {"columns": "id"}, {"output": "parts/"}])
def test_whatever_the_output_holds(run: Run, options: dict[str, Any]) -> None:
    rows = [{"id": i, "prompt": "" if i % 3 else "fine", "extra": str(i)} for i in range(100)]
    run.write(rows)
    if "output" in options:
        options = {"output": f"{run.output.parent}/parts/"}
    run(rows_per_part=16, return_token_ids=True, **options)
    assert run.failed() == [row for row in rows if row["id"] % 3]


def test_columns_that_have_the_names_of_ours(run: Run) -> None:
    rows = [
        {"prompt": "fine", "error": "yes", "row_index": 7, "metrics": "m"},
        {"prompt": "", "error": None, "row_index": None, "metrics": "m"},
    ]
    run.write(rows)
    run()
    assert run.failed() == [rows[1]]


def test_a_second_run_answers_what_was_put_right(run: Run, tmp_path: Path) -> None:
    run.write([{"id": i, "prompt": LONG if i == 3 else "p"} for i in range(5)])
    run()
    (row,) = run.failed()
    run.errors.write_text(json.dumps(row | {"prompt": "short"}) + "\n")
    again = {"inputs": (str(run.errors),), "output": str(tmp_path / "again.parquet")}
    assert run(**again, errors_file=None)["rows_ok"] == 1


def test_without_failures_it_is_empty_and_replaces_what_was_there(run: Run) -> None:
    run.write([{"prompt": "fine"}])
    run.errors.write_text('{"prompt": "of an earlier run"}\n')
    run()
    assert run.errors.read_bytes() == b""


def test_of_a_run_that_is_done(run: Run) -> None:
    rows = [{"id": i, "prompt": "" if i == 2 else "p"} for i in range(4)]
    run.write(rows)
    run(errors_file=None)
    assert not run.errors.exists()
    run()
    assert run.failed() == [rows[2]]
    assert run.logged[-2].endswith("is done already; there is nothing to run")


def test_of_a_run_that_was_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": i, "prompt": "" if i % 5 == 0 else "p"} for i in range(100)]
    run.write(rows)

    def die(step: str, path: Path) -> None:
        if step == "before rename" and path.name == "part-00004.parquet":
            raise OSError("stopped")

    monkeypatch.setattr(durable_io, "on_step", die)
    with pytest.raises(OutputError):
        run(rows_per_part=16)
    assert not run.errors.exists()
    monkeypatch.undo()
    summary = run(rows_per_part=16)
    assert summary["rows_resumed"] >= 64
    assert run.failed() == rows[::5]


@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename"])
def test_a_failure_to_write_it_leaves_the_old_one_and_can_be_made_up_for(
    run: Run, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write([{"prompt": ""}])
    run.errors.write_text("old\n")

    def fail(name: str, path: Path) -> None:
        if name == f"before {step}" and "errors.jsonl" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_io, "on_step", fail)
    with pytest.raises(OutputError, match=r"errors\.jsonl.*: No space left on device"):
        run()
    assert run.errors.read_text() == "old\n"
    monkeypatch.undo()
    run()
    assert run.failed() == [{"prompt": ""}]
    assert sorted(path.name for path in run.errors.parent.iterdir()) == [
        "errors.jsonl",
        "in.jsonl",
        "out.parquet",
        "out.parquet.cbatch",
    ]


def test_rows_of_csv_and_of_several_files(run: Run, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f"prompt,id\n,1{name}\np,2{name}\na,b,c\n")
    run(inputs=(str(tmp_path / "a.csv"), str(tmp_path / "b.csv")))
    assert run.failed() == [{"prompt": "", "id": "1a"}, {"prompt": "", "id": "1b"}]
    assert "2 more could not be read" in run.logged[-1]


def test_rows_of_parquet_in_json_types(run: Run, tmp_path: Path) -> None:
    when = datetime.datetime(2025, 3, 1, 12, 30, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "prompt": ["p", ""],
            "when": pa.array([when, when], pa.timestamp("us", tz="UTC")),
            "exact": pa.array([1, 2], pa.timestamp("ns")),
            "price": pa.array([Decimal("1.50")] * 2),
            "image": [b"\xff", b"\xfe\0"],
            "scores": [[1.5, float("nan")], [2.5, float("nan")]],
            "map": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
        }
    )
    path = tmp_path / "in.parquet"
    pq.write_table(table, path)
    run(inputs=(str(path),), columns="price")
    assert run.failed() == [
        {
            "prompt": "",
            "when": "2025-03-01T12:30:00+00:00",
            "exact": "1970-01-01 00:00:00.000000002",
            "price": "1.50",
            "image": base64.b64encode(b"\xfe\0").decode(),
            "scores": [2.5, None],
            "map": {"b": 2},
        }
    ]


def test_many_rows_are_written_a_piece_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors_file, "WRITE_BYTES", 100)
    rows = [{"id": i, "prompt": ""} for i in range(99)]
    run.write(rows)
    run(max_errors="100%")
    assert run.failed() == rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("errors.parquet", r"is no name of a \.jsonl file"),
        ("errors.jsonl.gz", r"is no name of a \.jsonl file"),
        ("folder.jsonl", r"is no name of a \.jsonl file"),
        ("out/errors.jsonl", "lies where the answers go"),
        ("out/deep/errors.jsonl", "lies where the answers go"),
        ("out.cbatch/errors.jsonl", "lies where the answers go"),
        ("in/../in.jsonl", r"would be read as part of the input .*in\.jsonl"),
        ("link.jsonl", r"would be read as part of the input .*in\.jsonl"),
        ("in/new.jsonl", r"would be read as part of the input .*in;"),
        ("in/deep/new.jsonl", r"would be read as part of the input .*in;"),
        ("some/new.jsonl", r"would be read as part of the input .*some/n\*\.jsonl"),
        ("all/new.jsonl", r"would be read as part of the input .*all/\*\*/\*\.jsonl"),
        ("all/a/b/new.jsonl", r"would be read as part of the input .*all/\*\*/\*\.jsonl"),
    ],
)
def test_places_that_are_refused(tmp_path: Path, name: str, message: str) -> None:
    for folder in ("in/deep", "folder.jsonl", "some", "all/a/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "in.jsonl").write_text('{"prompt": "p"}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    names = ["in.jsonl", "in", "some/n*.jsonl", "all/**/*.jsonl"]
    config = build_job_config(
        {
            "inputs": tuple(str(tmp_path / name) for name in names),
            "output": f"{tmp_path}/out/",
            "errors_file": str(tmp_path / name),
        }
    )
    with pytest.raises(UsageError, match=message):
        run_job(config, loader=NULL_LOADER)
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "p"}\n'


@pytest.mark.parametrize("name", ["some/deep/new.jsonl", "some/other.jsonl", "new.jsonl"])
def test_places_that_no_pattern_finds(tmp_path: Path, name: str) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "n.jsonl").write_text('{"prompt": ""}\n')
    config = build_job_config(
        {
            "inputs": (str(tmp_path / "some" / "n*.jsonl"),),
            "output": str(tmp_path / "out.parquet"),
            "errors_file": str(tmp_path / name),
        }
    )
    run_job(config, loader=NULL_LOADER)
    assert (tmp_path / name).read_text() == '{"prompt":""}\n'
