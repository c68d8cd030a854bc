"""Where a run stands, told from its files: before it, while it runs, when it is dead or done."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.assembly import EngineLoader, LoadedEngine
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig, build_job_config
from cbatch_cli.data import durable_io
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import OutputError, UsageError
from cbatch_cli.job import run_job
from cbatch_cli.status import RunStatus, read_status
from tests.null_engine import NULL_LOADER, load_null_engine

ROWS_PER_PART = 16


def write_rows(path: Path, num_rows: int) -> Path:
    rows = [{"id": i, "prompt": "" if i % 10 == 0 else f"p{i}"} for i in range(num_rows)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path, output: str, loader: EngineLoader = NULL_LOADER, **options: Any) -> None:
    config = build_job_config(
        {
            "inputs": (str(source),),
            "output": output,
            "rows_per_part": ROWS_PER_PART,
            "max_tokens": 2,
            **options,
        }
    )
    run_job(config, loader=loader)


def one(output: Path | str) -> RunStatus:
    (status,) = read_status(str(output))
    return status


def die_at(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Make a run fail as it renames a part."""

    def die(step: str, path: Path) -> None:
        if step == "before rename" and path.name == f"part-{part:05d}.parquet":
            raise OSError("stopped")

    monkeypatch.setattr(durable_io, "on_step", die)


class Gate:
    """A null engine that stands still once it has answered `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.is_closed = threading.Event()
        self.may_go_on = threading.Event()

    @property
    def loader(self) -> EngineLoader:
        return EngineLoader(identify=NULL_LOADER.identify, load=self._load)

    def _load(self, model: str, config: EngineConfig, log: Any) -> LoadedEngine:
        engine = load_null_engine(model, config)
        generate = engine.client.generate

        def gated(requests: Any) -> Iterator[Any]:
            for count, output in enumerate(generate(requests)):
                if count == self._num_rows:
                    self.is_closed.set()
                    assert self.may_go_on.wait(300)
                yield output

        engine.client.generate = gated  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
def test_while_it_runs_and_when_it_is_done(tmp_path: Path, kind: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", 200)
    output = f"{tmp_path}/{kind}"
    gate = Gate(100)
    thread = threading.Thread(target=run, args=(source, output, gate.loader))
    thread.start()
    try:
        assert gate.is_closed.wait(300)
        deadline = time.monotonic() + 300
        while one(output).rows < 100 and time.monotonic() < deadline:
            time.sleep(0.01)  # the writer is a thread behind the engine
        status = one(output)
    finally:
        gate.may_go_on.set()
        thread.join()
    assert (status.state, status.pid) == ("running", os.getpid())
    assert status.output == str(Path(output))
    assert 100 <= status.rows < 200
    assert status.rows == status.rows_in_parts + status.rows_in_journal
    assert status.parts >= 5 and status.rows_in_parts == ROWS_PER_PART * status.parts
    assert status.errors == {"empty_prompt": status.rows_failed}
    assert status.rows_failed >= 10
    assert status.input_fraction == pytest.approx(status.rows / 200, abs=0.05)
    assert status.last_record_age_s is not None and status.last_record_age_s < 60

    done = one(output)
    assert (done.state, done.pid) == ("done", None)
    assert (done.rows, done.rows_failed, done.errors) == (200, 20, {"empty_prompt": 20})
    assert done.rows_in_journal == done.partial_generations == 0
    assert done.input_fraction == 1.0


def test_asking_often_does_not_disturb_a_run(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 400)
    output = tmp_path / "out.parquet"
    states = set()
    thread = threading.Thread(target=run, args=(source, str(output)), kwargs={"rows_per_part": 7})
    thread.start()
    while thread.is_alive():
        try:
            status = one(output)
        except UsageError:
            continue
        states.add(status.state)
        assert status.rows <= 400
    thread.join()
    assert one(output).rows == pq.read_metadata(output).num_rows == 400
    assert states <= {"running", "done", "interrupted"}


def test_whoever_asks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet.cbatch"
    path.mkdir()
    (path / "lock").touch()
    (path / "run.json").touch()
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            durable_io.is_locked(path / "lock")
            time.sleep(0.0001)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(300):
            WorkDir(path).close()
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("kind", ["out.parquet", "out/"])
def test_of_an_interrupted_run(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", 200)
    output = f"{tmp_path}/{kind}"
    die_at(monkeypatch, 4)
    with pytest.raises(OutputError):
        run(source, output)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    status = one(output)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (status.state, status.pid) == ("interrupted", None)
    assert (status.parts, status.rows_in_parts) == (4, 64)
    assert status.rows_in_journal >= 16 and status.rows == 64 + status.rows_in_journal
    assert status.input_fraction == pytest.approx(status.rows / 200, abs=0.05)


def test_partial_generations_and_damage_at_the_tail(tmp_path: Path) -> None:
    from cbatch_cli.data.journal import Journal
    from tests.data.output_fakes import make_result, make_row

    source = write_rows(tmp_path / "in.parquet", 50)
    output = tmp_path / "out.parquet"
    run(source, str(output))
    output.unlink()
    work_dir = tmp_path / "out.parquet.cbatch"
    values = json.loads((work_dir / "run.json").read_text()) | {"summary": None}
    (work_dir / "run.json").write_text(json.dumps(values))
    journal = Journal.open(work_dir)
    for row in map(make_row, range(4)):  # row 3 has an error
        journal.append_result(row.index, row.content_hash, make_result(row))
    journal.append_partial(7, b"", [1, 2], 1)
    journal.append_partial(8, b"", [1, 2], 1)
    journal.append_partial(8, b"", [1, 2, 3], 2)
    journal.append_partial(2, b"", [1], 1)
    journal.close()
    segment = next(work_dir.glob("journal-*.bin"))
    segment.write_bytes(segment.read_bytes() + b"\0" * 99)
    status = one(output)
    assert (status.rows, status.rows_in_journal, status.rows_in_parts) == (4, 4, 0)
    assert status.errors == {"invalid_json": 1}
    assert status.partial_generations == 2
    assert status.input_fraction == 4 / 50
    assert status.state == "interrupted"


def test_an_answer_makes_up_for_a_failure(tmp_path: Path) -> None:
    from cbatch_cli.data.journal import Journal
    from tests.data.output_fakes import make_result, make_row

    run(write_rows(tmp_path / "in.jsonl", 5), str(tmp_path / "out.parquet"))
    (tmp_path / "out.parquet").unlink()
    work_dir = tmp_path / "out.parquet.cbatch"
    values = json.loads((work_dir / "run.json").read_text()) | {"summary": None}
    (work_dir / "run.json").write_text(json.dumps(values))
    bad, good = make_result(make_row(3)), make_result(make_row(2))
    journal = Journal.open(work_dir)
    for row, result in [(2, bad), (2, good), (3, good), (3, bad)]:
        import dataclasses

        journal.append_result(row, b"", dataclasses.replace(result, row_index=row))
    journal.close()
    status = one(tmp_path / "out.parquet")
    assert (status.rows, status.rows_failed) == (2, 0)


def test_the_share_is_not_known_before_the_first_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 20)
    die_at(monkeypatch, 0)
    with pytest.raises(OutputError):
        run(source, str(tmp_path / "out.parquet"))
    status = one(tmp_path / "out.parquet")
    assert status.rows > 0 and status.input_fraction is None
    with pytest.raises(OutputError):
        run(source, str(tmp_path / "limited.parquet"), limit=18)
    limited = one(tmp_path / "limited.parquet")
    assert limited.input_fraction == limited.rows / 18


def test_an_output_that_was_moved_tells_its_totals(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", 40)
    for kind in ("out.parquet", "out/"):
        run(source, f"{tmp_path}/{kind}")
        moved = tmp_path / f"moved-{kind.strip('/')}"
        (tmp_path / kind).rename(moved)
        status = one(moved)
        assert (status.state, status.rows, status.rows_failed) == ("done", 40, 4)
        with pytest.raises(UsageError, match="there is no output of a run at"):
            one(f"{tmp_path}/{kind}")


def test_what_is_no_output(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "data.parquet")
    (tmp_path / "text.parquet").write_text("text")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    for name in ("data.parquet", "text.parquet", "absent.parquet", "empty/", "no/where/x.parquet"):
        with pytest.raises(UsageError, match="there is no output of a run at"):
            read_status(f"{tmp_path}/{name}")
    with pytest.raises(UsageError, match="names neither a .parquet file nor a folder"):
        read_status(f"{tmp_path}/data.jsonl")
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_has_not_begun_to_answer(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "out.parquet.cbatch"):
        status = one(tmp_path / "out.parquet")
    assert (status.state, status.pid, status.rows) == ("running", os.getpid(), 0)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.parquet", 200)
    output = tmp_path / "out.parquet"
    die_at(monkeypatch, 4)
    with pytest.raises(OutputError):
        run(source, str(output))
    assert main(["status", str(output), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["state"] == "interrupted" and values["rows_in_parts"] == 64
    assert main(["status", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows, failed, kept = values["rows"], values["rows_failed"], values["rows_in_journal"]
    assert lines[:5] == [
        f"output    {output}",
        "state     interrupted",
        f"rows      {rows} done: {rows - failed} ok, {failed} failed ({failed} empty_prompt)",
        f"kept      64 in 4 parts, {kept} in the journal; 0 more are half generated",
        f"input     {rows / 200:.1%} done",
    ]
    assert lines[5].startswith("last row  0:00:")
    monkeypatch.undo()
    run(source, str(output))
    assert main(["status", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "state     done",
        "rows      200 done: 180 ok, 20 failed (20 empty_prompt)",
    ]
    assert main(["status", str(tmp_path / "other.parquet")]) == 2
    assert "there is no output of a run at" in capsys.readouterr().err


def test_of_a_job_in_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.parquet", 100)
    output = tmp_path / "out.parquet"
    run(source, str(output), shard="0/3")
    die_at(monkeypatch, 4)
    with pytest.raises(OutputError):
        run(source, str(output), shard="1/3")
    assert main(["status", str(output), "--json"]) == 0
    shards = json.loads(capsys.readouterr().out)["shards"]
    assert [(shard["shard"], shard["state"]) for shard in shards] == [
        ("0/3", "done"),
        ("1/3", "interrupted"),
    ]
    assert shards[0]["rows"] == 36 and shards[1]["rows_in_parts"] == 16
    assert shards[1]["input_fraction"] == pytest.approx(shards[1]["rows"] / 32)
    assert main(["status", str(output)]) == 0
    assert capsys.readouterr().out.count("state     ") == 2


def test_the_share_of_a_shard_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", 1000)
    die_at(monkeypatch, 40)
    with pytest.raises(OutputError):
        run(source, str(tmp_path / "out.parquet"), shard="1/3")
    (status,) = read_status(str(tmp_path / "out.parquet"))
    own = sum((row // ROWS_PER_PART) % 3 == 1 for row in range(1000))
    assert status.input_fraction == pytest.approx(status.rows / own, abs=0.05)
