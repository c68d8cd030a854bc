"""A job that was interrupted, or is done, and is run again."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch_cli.data import durable_io, records
from cbatch_cli.data.parquet_source import ParquetSource
from cbatch_cli.data.row import Row
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import (
    ModelError,
    OutputError,
    ResumeMismatchError,
    RunInterruptedError,
    UsageError,
)
from tests.resuming import (
    NUM_ROWS,
    WatchedRun,
    content,
    metrics,
    num_tokens,
    rows_of,
    write_input,
    write_jsonl,
)


@pytest.fixture(params=["out.parquet", "out/"], ids=["file", "folder"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/{request.param}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", rows_of())


def work_dir_of(output: str) -> Path:
    return Path(output.rstrip("/") + ".cbatch")


def interrupt(source: Path | str, output: str, *, step: int = 20, **options: Any) -> WatchedRun:
    """A run that is stopped by SIGTERM."""
    run = WatchedRun(stop_at_step=step)
    with pytest.raises(RunInterruptedError) as caught:
        run(source, output, **options)
    assert caught.value.exit_code == 143
    assert run.finished and len(run.finished) < NUM_ROWS
    return run


@pytest.mark.parametrize("kind", ["jsonl", "two files", "jsonl.gz", "csv", "parquet"])
def test_resumed_is_as_if_never_interrupted(tmp_path: Path, kind: str, output: str) -> None:
    options = {**write_input(tmp_path, kind), "return_token_ids": True}
    WatchedRun()("", tmp_path / "whole.parquet", **options)
    runs = [interrupt("", output, step=20, **options), interrupt("", output, step=9, **options)]
    runs.append(WatchedRun())
    summary = runs[-1]("", output, **options)

    assert content(Path(output)) == content(tmp_path / "whole.parquet")
    finished: Counter[int] = sum((Counter(run.finished.keys()) for run in runs), Counter())
    assert finished == Counter(range(NUM_ROWS)), "a row ended twice, or never"
    assert summary["rows"] == summary["rows_ok"] == NUM_ROWS
    assert summary["rows_resumed"] == NUM_ROWS - len(runs[-1].finished)
    assert os.listdir(work_dir_of(output)) == ["run.json"]


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_generations_go_on_where_they_were(
    source: Path, output: str, stop_signal: signal.Signals
) -> None:
    first = WatchedRun(stop_at_step=20, stop_signal=stop_signal)
    with pytest.raises(RunInterruptedError) as caught:
        first(source, output)
    assert caught.value.exit_code == 128 + stop_signal
    assert any("resume with: cbatch" in line for line in first.log)
    second = interrupt(source, output, step=4)
    third = WatchedRun()
    third(source, output)

    partial = {row: out.token_ids for row, out in first.cancelled.items() if out.token_ids}
    assert partial
    given = {**third.given, **second.given}
    for row, request in given.items():
        assert request.resumed_token_ids == partial.get(row, ())
        assert request.attempt == (2 if row in partial else 1)
    attempts = [row["attempt"] for row in metrics(Path(output))]
    assert all(attempts[row] > 1 for row in partial) and set(attempts) <= {1, 2, 3}
    sampled = first.num_sampled + second.num_sampled + third.num_sampled
    assert sampled == {row: num_tokens(row) for row in range(NUM_ROWS)}


def test_a_signal_before_the_first_step_is_not_lost(source: Path, output: str) -> None:
    run = WatchedRun(stop_at_step=0)
    with pytest.raises(RunInterruptedError):
        run(source, output)
    assert run.num_sampled.total() <= 8

    class Early(WatchedRun):
        def _load(self, *args: Any) -> Any:
            engine = super()._load(*args)
            generate = engine.client.generate

            def stopped(requests: Any) -> Any:
                signal.raise_signal(signal.SIGTERM)
                return generate(requests)

            engine.client.generate = stopped
            return engine

    early = Early()
    with pytest.raises(RunInterruptedError):
        early(source, output)
    assert len(early.finished) < NUM_ROWS / 2


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the rows that sources give."""
    read: list[int] = []

    def watch(owner: Any) -> None:
        rows = owner.rows

        def watched(*args: Any, **kwargs: Any) -> Iterator[Row]:
            for row in rows(*args, **kwargs):
                read.append(row.index)
                yield row

        monkeypatch.setattr(owner, "rows", watched)

    watch(records.RecordFiles)
    watch(ParquetSource)
    return read


@pytest.mark.parametrize(
    ("kind", "skips"),
    [("jsonl", True), ("two files", True), ("parquet", True), ("jsonl.gz", False), ("csv", False)],
)
def test_what_is_in_parts_is_not_even_read(
    tmp_path: Path, rows_read: list[int], output: str, kind: str, skips: bool
) -> None:
    options = write_input(tmp_path, kind)
    # Past the end of the first file, where there are two.
    interrupt("", output, step=34, max_tokens=5, rows_per_part=7, **options)
    folder = Path(output) if output.endswith("/") else work_dir_of(output)
    parts = sorted(folder.glob("part-*.parquet"))
    num_whole = next(n for n in range(99) if not (folder / f"part-{n:05d}.parquet").exists())
    assert 0 < num_whole <= len(parts)
    rows_read.clear()
    WatchedRun()("", output, max_tokens=5, rows_per_part=7, **options)

    assert rows_read == list(range(7 * num_whole if skips else 0, NUM_ROWS))
    assert [row["row_index"] for row in content(Path(output))] == list(range(NUM_ROWS))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("change", ["touched", "moved"])
def test_the_same_rows_elsewhere_are_read_and_accepted(
    tmp_path: Path, rows_read: list[int], output: str, kind: str, change: str
) -> None:
    options = write_input(tmp_path, kind)
    first = interrupt("", output, step=30, **options)
    (path,) = map(Path, options["inputs"])
    if change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path = path.rename(path.with_name("moved" + path.suffix))
    rows_read.clear()
    run = WatchedRun()
    run(path, output)
    assert rows_read == list(range(NUM_ROWS))
    assert not run.finished.keys() & first.finished.keys()


def large_rows() -> list[dict[str, Any]]:
    """More than the two MiB that the fingerprint looks at: rows 1 to 15 are between them."""
    return [{**row, "pad": "x" * (25_000 if row["id"] else 1_300_000)} for row in rows_of()]


@pytest.mark.parametrize("has_parts", [True, False])
def test_a_changed_row_is_refused_each_time(tmp_path: Path, output: str, has_parts: bool) -> None:
    rows = large_rows()
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    rows_per_part = 5 if has_parts else 1000
    interrupt(source, output, step=45, rows_per_part=rows_per_part)
    rows[2]["pad"] = "y" + rows[2]["pad"][1:]
    write_jsonl(source, rows)
    os.utime(source, ns=(1, 1))
    for _ in range(2):
        with pytest.raises(ResumeMismatchError) as caught:
            WatchedRun()(source, output, rows_per_part=rows_per_part)
        assert caught.value.exit_code == 3
        expected = "rows 0 to 4 of the input" if has_parts else "row 2 of the input"
        assert expected in str(caught.value) and "--overwrite" in str(caught.value)
    rows[2]["pad"] = "x" + rows[2]["pad"][1:]
    write_jsonl(source, rows)
    WatchedRun()(source, output, rows_per_part=rows_per_part)
    assert len(content(Path(output))) == NUM_ROWS


def test_rows_that_come_or_go_are_refused(tmp_path: Path, output: str) -> None:
    rows = large_rows()
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    run = WatchedRun()

    def die(self: Any, metadata: Any) -> None:
        raise OutputError("full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cbatch_cli.data.parquet_sink.ParquetSink._join", die)
        patch.setattr("cbatch_cli.resume.RunPlan.end", die)
        with pytest.raises((OutputError, TypeError)):
            run(source, output, rows_per_part=50)
    data = source.read_bytes()
    # As many bytes and the same edges; row 5 is two, or one with the next.
    start = data.index(b'{"id": 5,')
    line = data[start : data.index(b"\n", start) + 1]
    middle = len(line) // 2
    for changed in (line[:middle] + b"\n" + line[middle + 1 :], line[:-1] + b" "):
        source.write_bytes(data.replace(line, changed))
        with pytest.raises(ResumeMismatchError, match=r"rows 0 to 49|the number of rows"):
            WatchedRun()(source, output, rows_per_part=50)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("sampling", {"max_tokens": 7}),
    ("sampling", {"temperature": 0.5}),
    ("sampling", {"stop": ("x",)}),
    ("seed", {"seed": 5}),
    ("columns", {"columns": "id"}),
    ("limit", {"limit": 59}),
    ("output_column", {"output_column": "answer"}),
    ("return_token_ids", {"return_token_ids": True}),
    ("rows_per_part", {"rows_per_part": 9}),
    ("system", {"system": "be kind"}),
    ("template", {"template": "{{ prompt }}!"}),
    ("max_line_bytes", {"max_line_bytes": 999}),
    ("model", {"model": "other"}),
    ("dtype", {"dtype": "float32"}),
    ("input_format", {"input_format": "jsonl"}),
]


@pytest.mark.parametrize(("field", "change"), CHANGES)
def test_another_job_is_refused_by_the_names_of_what_changed(
    source: Path, output: str, field: str, change: dict[str, Any]
) -> None:
    first = interrupt(source, output)
    before = snapshot(work_dir_of(output))
    run = WatchedRun()
    with pytest.raises(ResumeMismatchError, match=rf": {field} changed since.*--overwrite.*-o"):
        run(source, output, **change)
    assert run.num_loads == 0 and snapshot(work_dir_of(output)) == before
    last = WatchedRun()
    last(source, output)
    assert not last.finished.keys() & first.finished.keys()


def as_json(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_all_that_changed_is_named(source: Path, output: str) -> None:
    interrupt(source, output)
    source.write_bytes(source.read_bytes() + b"{}\n")
    with pytest.raises(ResumeMismatchError, match=": inputs, limit, sampling changed"):
        WatchedRun()(source, output, limit=9, max_tokens=9)


def test_sampling_that_the_model_settles_is_compared(
    source: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, output)
    monkeypatch.setattr("cbatch_cli.assembly.DEFAULT_MAX_TOKENS", 9)
    before = snapshot(work_dir_of(output))
    original = WatchedRun._load

    def load(self: WatchedRun, *args: Any) -> Any:
        engine = original(self, *args)
        return type(engine)(
            client=engine.client,
            tokenizer=engine.tokenizer,
            generation_defaults={"do_sample": True, "top_k": 64},
            description=engine.description,
            load_s=0.0,
        )

    monkeypatch.setattr(WatchedRun, "_load", load)
    with pytest.raises(ResumeMismatchError, match="resolved sampling changed"):
        WatchedRun()(source, output)
    assert snapshot(work_dir_of(output)) == before


def test_how_the_engine_batches_is_no_part_of_the_job(source: Path, output: str) -> None:
    WatchedRun()(source, source.with_name("whole.parquet"))
    first = interrupt(source, output)
    run = WatchedRun()
    run(
        source,
        output,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        step_timeout=60.0,
        progress="none",
        on_error="fail",
        max_errors="5",
        allow_errors=True,
    )
    assert not run.finished.keys() & first.finished.keys()
    assert content(Path(output)) == content(source.with_name("whole.parquet"))


def test_a_job_that_is_done_is_not_run_again(source: Path, output: str) -> None:
    summary = as_json(WatchedRun()(source, output))
    before = content(Path(output))
    run = WatchedRun()
    assert "already_done" not in summary
    assert run(source, output) == {**summary, "already_done": True}
    assert run.num_loads == 0 and "nothing to run" in run.log[0]
    assert content(Path(output)) == before
    assert os.listdir(work_dir_of(output)) == ["run.json"]
    with pytest.raises(ResumeMismatchError, match="sampling changed"):
        WatchedRun()(source, output, max_tokens=9)
    with pytest.raises(UsageError, match="exists already"):
        WatchedRun()(source, output, no_resume=True)


def test_a_job_that_died_at_its_very_end_is_done(
    source: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: WorkDir, run: Any) -> None:
        if run["summary"] is not None:
            raise OutputError("power failed")
        write_run(self, run)

    write_run = WorkDir.write_run
    monkeypatch.setattr(WorkDir, "write_run", die)
    with pytest.raises(OutputError, match="power failed"):
        WatchedRun()(source, output)
    monkeypatch.undo()
    before = content(Path(output))
    run = WatchedRun()
    summary = run(source, output)
    assert summary["rows"] == NUM_ROWS and run.given == {}
    assert content(Path(output)) == before
    assert os.listdir(work_dir_of(output)) == ["run.json"]
    assert WatchedRun()(source, output) == as_json({**summary, "already_done": True})


def test_answers_that_were_taken_away_are_made_again(source: Path, output: str) -> None:
    WatchedRun()(source, output)
    if output.endswith("/"):
        shutil.rmtree(output)
    else:
        Path(output).unlink()
    run = WatchedRun()
    run(source, output, max_tokens=9)
    assert len(run.finished) == NUM_ROWS == len(content(Path(output)))


def test_overwrite_replaces_what_is_done_and_goes_on_with_what_it_began(
    source: Path, output: str
) -> None:
    WatchedRun()(source, output)
    old = content(Path(output))
    first = interrupt(source, output, max_tokens=5, overwrite=True)
    if not output.endswith("/"):
        assert content(Path(output)) == old, "the old answers stay until the new ones are whole"
    second = interrupt(source, output, step=9, max_tokens=5, overwrite=True)
    third = WatchedRun()
    third(source, output, max_tokens=5)
    assert not (first.finished.keys() & second.finished.keys())
    assert len(first.finished) + len(second.finished) + len(third.finished) == NUM_ROWS
    assert [len(row["completion"]) for row in content(Path(output))].count(12) == 6
    again = WatchedRun()
    again(source, output, max_tokens=5, overwrite=True)
    assert len(again.finished) == NUM_ROWS


@pytest.mark.parametrize("options", [{"overwrite": True}, {"no_resume": True}])
def test_an_interrupted_job_starts_over_when_told(
    source: Path, output: str, options: dict[str, Any]
) -> None:
    interrupt(source, output)
    run = WatchedRun()
    run(source, output, **options)
    assert len(run.finished) == NUM_ROWS == len(content(Path(output)))


def test_another_job_replaces_it_when_told(source: Path, output: str) -> None:
    interrupt(source, output)
    run = WatchedRun()
    run(source, output, overwrite=True, max_tokens=5, rows_per_part=50)
    assert len(run.finished) == NUM_ROWS == len(content(Path(output)))


def test_a_damaged_note_of_the_run_gives_nothing_up(source: Path, output: str) -> None:
    interrupt(source, output)
    path = work_dir_of(output) / "run.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    before = snapshot(work_dir_of(output))
    with pytest.raises(OutputError, match="damaged"):
        WatchedRun()(source, output)
    assert snapshot(work_dir_of(output)) == before
    run = WatchedRun()
    run(source, output, overwrite=True)
    assert len(run.finished) == NUM_ROWS


def test_old_answers_outlive_a_command_that_cannot_run(source: Path, output: str) -> None:
    WatchedRun()(source, output)
    old = content(Path(output))

    class Broken(WatchedRun):
        def _load(self, *args: Any) -> Any:
            raise ModelError("no such model")

    with pytest.raises(ModelError):
        Broken()(source, output, overwrite=True)
    with pytest.raises(UsageError, match="cannot be named"):
        WatchedRun()(source, output, overwrite=True, output_column="metrics")
    assert content(Path(output)) == old


def test_a_command_that_cannot_run_leaves_nothing_that_refuses_the_next(
    source: Path, output: str
) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        WatchedRun()(source, output, output_column="metrics")
    with pytest.raises(UsageError, match="template"):
        WatchedRun()(source, output, template="{% for %}")
    WatchedRun()(source, output)
    assert len(content(Path(output))) == NUM_ROWS


@pytest.mark.parametrize("has_journal", [True, False])
@pytest.mark.parametrize("damage", ["cut", "zeros", "gone"])
def test_rows_of_a_damaged_part_come_from_the_journal_or_run_again(
    source: Path, output: str, damage: str, has_journal: bool
) -> None:
    first = interrupt(source, output, step=30)
    folder = Path(output) if output.endswith("/") else work_dir_of(output)
    path = folder / "part-00001.parquet"
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-5])
        case "zeros":
            path.write_bytes(data[:100] + bytes(200) + data[300:])
        case _:
            path.unlink()
    if not has_journal:
        for segment in work_dir_of(output).glob("journal-*.bin"):
            segment.unlink()
    in_parts = {n for p in folder.glob("part-*") for n in range(8 * int(p.stem[5:]), NUM_ROWS)[:8]}
    run = WatchedRun()
    run(source, output)
    again = run.finished.keys() & first.finished.keys()
    if has_journal:
        assert again <= set(range(8, 16))
    else:
        assert set(range(8, 16)) <= again
        assert not again & (in_parts - set(range(8, 16)))
    WatchedRun()(source, source.with_name("whole.parquet"))
    assert content(Path(output)) == content(source.with_name("whole.parquet"))


def test_unfinished_files_of_a_dead_run_are_in_nobodys_way(source: Path, output: str) -> None:
    interrupt(source, output)
    work_dir = work_dir_of(output)
    for number in range(8):
        for suffix in (".tmp", ".scratch.tmp"):
            (work_dir / f"part-{number:05d}.parquet{suffix}").write_bytes(b"half")
    (work_dir / "out.parquet.tmp").write_bytes(b"half")
    WatchedRun()(source, output)
    assert len(content(Path(output))) == NUM_ROWS


def test_segments_whose_rows_are_in_parts_do_not_pile_up(source: Path, output: str) -> None:
    for _ in range(4):
        interrupt(source, output, step=10)
    assert len(list(work_dir_of(output).glob("journal-*.bin"))) <= 3


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_stdin_is_kept_for_the_run_that_resumes(
    source: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = source.read_bytes()
    set_stdin(monkeypatch, data)
    first = interrupt("-", output)
    set_stdin(monkeypatch, b"")
    second = interrupt("-", output, step=9)
    set_stdin(monkeypatch, data + b'{"prompt": "one more"}\n')
    with pytest.raises(ResumeMismatchError, match="inputs changed"):
        WatchedRun()("-", output)
    set_stdin(monkeypatch, data)
    third = interrupt("-", output, step=9)
    set_stdin(monkeypatch, b"")
    last = WatchedRun()
    last("-", output)
    finished = Counter(row for run in (first, second, third, last) for row in run.finished)
    assert finished == Counter(range(NUM_ROWS))
    assert os.listdir(work_dir_of(output)) == ["run.json"]
    set_stdin(monkeypatch, data)
    done = WatchedRun()
    done("-", output)
    assert done.num_loads == 0
    assert os.listdir(work_dir_of(output)) == ["run.json"]


def test_stdin_of_a_run_that_never_began_is_not_kept(
    source: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, source.read_bytes())
    with pytest.raises(UsageError):
        WatchedRun()("-", output, prompt_column="absent")
    assert not work_dir_of(output).exists()


def test_a_lasting_error_on_the_device_is_told_and_what_is_done_is_kept(
    source: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes = 0

    def fill_up(step: str, path: Path) -> None:
        nonlocal num_writes
        num_writes += step == "before write"
        if num_writes > 25 and step == "before write":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable_io, "on_step", fill_up)
    with pytest.raises(OutputError, match="No space left") as caught:
        WatchedRun()(source, output)
    assert caught.value.exit_code == 5
    monkeypatch.undo()
    run = WatchedRun()
    run(source, output)
    assert 0 < len(run.finished) < NUM_ROWS == len(content(Path(output)))


def test_a_name_that_is_no_text_is_no_obstacle(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    source = write_jsonl(Path(os.fsdecode(folder + b"/in.jsonl")), rows_of())
    output = str(tmp_path / "out.parquet")
    first = interrupt(source, output)
    run = WatchedRun()
    run(source, output)
    assert not run.finished.keys() & first.finished.keys()


def test_the_summary_says_what_was_resumed(source: Path, output: str) -> None:
    first = interrupt(source, output)
    summary = WatchedRun()(source, output)
    assert summary["rows_resumed"] == len(first.finished)
    metadata = json.loads((work_dir_of(output) / "run.json").read_bytes())
    assert metadata["summary"]["rows_resumed"] == len(first.finished)
