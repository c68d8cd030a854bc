"""Joining shards: the same output as without shards, or a refusal that says why."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.cli import main
from cbatch_cli.config import build_job_config
from cbatch_cli.data import durable_io, merged_output
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import OutputError, OutputLockedError, ResumeMismatchError, UsageError
from cbatch_cli.job import run_job
from cbatch_cli.merge import merge_shards
from cbatch_cli.status import read_status
from tests.null_engine import NULL_LOADER

KINDS = ["out.parquet", "out/"]


class Job:
    """A job over `in.jsonl` in a folder, run in shards or whole."""

    def __init__(self, folder: Path, kind: str, num_rows: int = 50) -> None:
        self.folder = folder
        self.source = folder / "in.jsonl"
        self.output = f"{folder}/{kind}"
        self.is_folder = kind.endswith("/")
        rows = [
            {"id": i, "prompt": f"p{i}" if i % 9 else "", "tags": ["a", str(i)]}
            for i in range(num_rows)
        ]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, shard: str | None, **options: Any) -> dict[str, Any]:
        config = build_job_config(
            {
                "inputs": (str(self.source),),
                "output": self.output,
                "shard": shard,
                "prompt_column": "prompt",
                "rows_per_part": 4,
                "max_tokens": 3,
                **options,
            }
        )
        return run_job(config, loader=NULL_LOADER)

    def run_all(self, count: int, **options: Any) -> list[dict[str, Any]]:
        return [self.run(f"{index}/{count}", **options) for index in range(count)]

    def merge(self, *, overwrite: bool = False, remove_shards: bool = False) -> dict[str, Any]:
        return merge_shards(self.output, overwrite=overwrite, remove_shards=remove_shards)

    def shard(self, index: int, count: int) -> Path:
        suffix = "" if self.is_folder else ".parquet"
        return self.folder / f"out.shard-{index:05d}-of-{count:05d}{suffix}"

    def work_dir(self, index: int, count: int) -> Path:
        return self.folder / f"{self.shard(index, count).name}.cbatch"

    def edit_run(self, index: int, count: int, part: str, **changes: Any) -> None:
        path = self.work_dir(index, count) / "run.json"
        values = json.loads(path.read_text())
        values[part] |= changes
        path.write_text(json.dumps(values))


@pytest.fixture(params=KINDS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(tmp_path, request.param)


def content(path: str | Path) -> pa.Table:
    """Everything that does not depend on the clock."""
    return pq.read_table(path).drop_columns(["metrics"])


def names(path: str | Path) -> list[str]:
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_rows", "count", "with_token_ids"),
    [
        (0, 1, False),
        (0, 3, True),
        (4, 2, False),
        (5, 2, False),
        (24, 3, False),
        (50, 4, True),
        (9, 7, False),
    ],
)
def test_as_if_it_had_been_run_whole(
    tmp_path: Path, kind: str, num_rows: int, count: int, with_token_ids: bool
) -> None:
    whole = Job(tmp_path, f"whole-{kind}", num_rows)
    expected = whole.run(None, return_token_ids=with_token_ids)
    job = Job(tmp_path, kind, num_rows)
    job.run_all(count, return_token_ids=with_token_ids)
    summary = job.merge()
    assert content(job.output).equals(content(whole.output))
    assert pq.read_schema(_files(job.output)[0]).equals(
        pq.read_schema(_files(whole.output)[0]), check_metadata=False
    )
    assert names(job.output) == names(whole.output)
    for name in ("rows", "rows_ok", "rows_failed", "errors", "prompt_tokens", "output_tokens"):
        assert summary[name] == expected[name], name
    assert summary["output"] == str(Path(job.output))
    # The command of the whole job finds it done, and its failed rows can be tried again.
    again = job.run(None, return_token_ids=with_token_ids)
    assert again == {**summary, "already_done": True}
    retried = job.run(None, return_token_ids=with_token_ids, retry_errors=True)
    assert retried["rows"] == num_rows and retried["rows_failed"] == expected["rows_failed"]
    if expected["rows_failed"]:
        assert retried["rows_resumed"] == expected["rows_ok"]
    assert content(job.output).equals(content(whole.output))


def _files(output: str | Path) -> list[Path]:
    path = Path(output)
    return sorted(path.iterdir()) if path.is_dir() else [path]


def test_the_metadata_tells_of_the_whole_and_of_each_shard(job: Job) -> None:
    summaries = job.run_all(3)
    summary = job.merge()
    note = json.loads(pq.read_metadata(_files(job.output)[-1]).metadata[b"cbatch.run"])
    assert note["totals"] == summary
    assert note["shards"] == json.loads(json.dumps(summaries))
    assert note["config"]["shard"] is None and note["config"]["max_tokens"] == 3
    assert note["resolved"]["sampling"]["max_tokens"] == 3
    (status,) = read_status(job.output)
    assert (status.state, status.rows, status.shard) == ("done", 50, None)


def test_the_order_is_that_of_the_input_and_shards_stay(job: Job) -> None:
    job.run_all(3)
    before = {path: content(path) for path in (job.shard(index, 3) for index in range(3))}
    job.merge()
    assert content(job.output)["row_index"].to_pylist() == list(range(50))
    assert all(content(path).equals(table) for path, table in before.items())


def test_shards_are_removed_on_demand(job: Job) -> None:
    job.run_all(3)
    (job.folder / "out.shard-of-mine.txt").touch()
    job.merge(remove_shards=True)
    output = Path(job.output).name
    assert names(job.folder) == sorted(
        ["in.jsonl", output, f"{output}.cbatch", "out.shard-of-mine.txt"]
    )
    assert names(job.folder / f"{output}.cbatch") == ["run.json"]


@pytest.mark.parametrize("remove_first", [False, True])
def test_merging_again_writes_nothing(job: Job, remove_first: bool) -> None:
    job.run_all(2)
    first = job.merge(remove_shards=remove_first)
    before = [path.stat().st_mtime_ns for path in _files(job.output)]
    assert job.merge(remove_shards=True) == first
    assert [path.stat().st_mtime_ns for path in _files(job.output)] == before
    assert not any("shard" in name for name in names(job.folder))


def test_a_removal_that_died_is_finished(job: Job) -> None:
    job.run_all(3)
    job.merge()
    shutil.rmtree(job.work_dir(0, 3))
    for path in _files(job.shard(0, 3)):
        path.unlink()
    if job.is_folder:
        job.shard(0, 3).rmdir()
    for path in _files(job.shard(1, 3)):
        path.unlink()
    job.merge(remove_shards=True)
    assert content(job.output).num_rows == 50
    assert names(job.folder) == sorted(
        ["in.jsonl", Path(job.output).name, f"{Path(job.output).name}.cbatch"]
    )


def test_shards_that_were_run_again_are_merged_again(job: Job) -> None:
    job.run_all(2)
    job.merge()
    job.run("1/2", retry_errors=True)
    with pytest.raises(UsageError, match="exists already"):
        job.merge()
    assert job.merge(overwrite=True)["rows"] == 50
    assert content(job.output).num_rows == 50


def refused(job: Job, kind: type[Exception], **options: bool) -> str:
    before = names(job.folder)
    output_before = [path.read_bytes() for path in _files(job.output) if path.exists()]
    with pytest.raises(kind) as caught:
        job.merge(**options)
    assert [path.read_bytes() for path in _files(job.output) if path.exists()] == output_before
    assert names(job.folder) == before
    return str(caught.value)


def test_nothing_to_merge(job: Job) -> None:
    assert "there are no shards beside" in refused(job, UsageError)
    assert main(["merge", f"{job.folder}/no/where/out.parquet"]) == 2
    assert names(job.folder) == ["in.jsonl"]


def test_a_shard_that_is_missing(job: Job) -> None:
    job.run("0/4")
    job.run("2/4")
    assert "there is no shard 1/4, 3/4" in refused(job, UsageError)


def test_shards_of_two_ways_to_share(job: Job) -> None:
    job.run_all(2)
    job.run("0/3")
    assert "are shards of 2 and of 3" in refused(job, UsageError)


def test_a_shard_that_is_not_done(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run("0/2")

    def die(step: str, path: Path) -> None:
        if step == "before rename" and path.name == "part-00005.parquet":
            raise OSError("stopped")

    monkeypatch.setattr(durable_io, "on_step", die)
    with pytest.raises(OutputError):
        job.run("1/2")
    monkeypatch.undo()
    assert "shard 1/2 is not done; run its command again" in refused(job, UsageError)
    job.run("1/2")
    assert job.merge()["rows"] == 50


def test_a_shard_whose_answers_or_work_dir_are_gone(job: Job) -> None:
    job.run_all(2)
    kept = job.folder / "kept"
    job.work_dir(0, 2).rename(kept)
    assert "which says what shard 0/2 is, is not there" in refused(job, UsageError)
    kept.rename(job.work_dir(0, 2))
    job.shard(1, 2).rename(job.folder / "kept.parquet")
    assert "shard 1/2 is not done" in refused(job, UsageError)


def test_a_shard_that_is_being_run(job: Job) -> None:
    job.run_all(2)
    with WorkDir(job.work_dir(1, 2)):
        assert "is locked by another run" in refused(job, OutputLockedError)


def test_shards_of_different_jobs(job: Job) -> None:
    job.run("0/2")
    job.run("1/2", max_tokens=4, model="other")
    message = refused(job, ResumeMismatchError)
    assert "are of different jobs: model, resolved sampling, sampling differ" in message


def test_a_shard_under_the_name_of_another(job: Job) -> None:
    job.run_all(2)
    shutil.rmtree(job.work_dir(1, 2))
    shutil.copytree(job.work_dir(0, 2), job.work_dir(1, 2))
    assert "is not the shard that its name says: it is 0/2" in refused(job, ResumeMismatchError)


def test_shards_of_inputs_of_different_lengths(job: Job) -> None:
    job.run_all(2)
    values = json.loads((job.work_dir(1, 2) / "run.json").read_text())
    shard = values["summary"]["shard"] | {"rows_of_input": 54}
    job.edit_run(1, 2, "summary", shard=shard)
    assert "was made of 50 rows of input" in refused(job, UsageError)
    job.edit_run(0, 2, "summary", shard=shard | {"index": 0})
    assert "the shards hold 50 rows, the input has 54" in refused(job, UsageError)


def test_rows_that_are_there_twice_or_not_at_all(job: Job) -> None:
    job.run_all(2)
    one, other = job.shard(0, 2), job.shard(1, 2)
    if job.is_folder:
        lost = one / "part-00002.parquet"
        data = lost.read_bytes()
        lost.unlink()
        assert "row 8 is nowhere in the shards" in refused(job, UsageError)
        lost.write_bytes(data)
        (other / "part-00002.parquet").write_bytes(data)
        assert "row 8 is twice in the shards" in refused(job, UsageError)
    else:
        data = other.read_bytes()
        other.write_bytes(one.read_bytes())
        assert "row 0 is twice in the shards" in refused(job, UsageError)
        other.write_bytes(data)
        pq.write_table(pq.read_table(other).slice(4), other, row_group_size=4)
        assert "row 4 is nowhere in the shards" in refused(job, UsageError)


def test_rows_that_are_not_those_of_their_row_group(job: Job) -> None:
    job.run_all(2)
    path = _files(job.shard(1, 2))[0]
    table = pq.read_table(path)
    order = [1, 0, *range(2, table.num_rows)]
    pq.write_table(table.take(order), path, row_group_size=4)
    with pytest.raises(OutputError, match="does not hold the rows that it says"):
        job.merge()
    assert not any(path.exists() for path in _files(job.output))


def test_shards_with_other_columns(job: Job) -> None:
    job.run_all(2)
    path = _files(job.shard(1, 2))[-1]
    table = pq.read_table(path)
    renamed = ["ID", *table.schema.names[1:]]
    pq.write_table(table.rename_columns(renamed), path, row_group_size=4)
    assert "has other columns than the shards before it" in refused(job, UsageError)


def test_an_output_in_the_way(job: Job) -> None:
    job.run_all(2)
    if job.is_folder:
        Path(job.output).mkdir()
        (Path(job.output) / "part-00000.parquet").write_text("mine")
    else:
        Path(job.output).write_text("mine")
    assert "exists already" in refused(job, UsageError)
    assert job.merge(overwrite=True)["rows"] == 50
    assert content(job.output).num_rows == 50


def test_a_whole_run_that_was_begun_in_its_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run_all(2)

    def die(step: str, path: Path) -> None:
        if step == "before rename" and path.name == "part-00005.parquet":
            raise OSError("stopped")

    monkeypatch.setattr(durable_io, "on_step", die)
    with pytest.raises(OutputError):
        job.run(None)
    monkeypatch.undo()
    assert "was begun by a run of its own" in refused(job, UsageError)
    assert job.merge(overwrite=True)["rows"] == 50
    assert content(job.output).num_rows == 50
    assert names(job.folder / f"{Path(job.output).name}.cbatch") == ["run.json"]


class Died(BaseException):
    """Stands for the death of the process."""


class Stop:
    """Ends a merge at one of its steps: as the death of the process does, or as an error."""

    def __init__(self, stop_at: int, error: type[BaseException]) -> None:
        self._stop_at = stop_at
        self._error = error
        self.num_steps = 0

    def __call__(self, step: str, path: Path) -> None:
        if step == "after lock":
            return  # what holds the lock would not die with a process here
        self.num_steps += 1
        # Who is dead does not tidy up either.
        is_dead = self._error is Died and self.num_steps > self._stop_at
        if is_dead or self.num_steps == self._stop_at:
            raise self._error(28, "No space left on device")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [Died, OSError])
def test_a_merge_that_dies_or_fails_at_any_step_can_be_run_again(
    tmp_path: Path, kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    job = Job(ready, kind, num_rows=10)
    job.run_all(2)
    job.folder = tmp_path / "now"
    job.output = f"{job.folder}/{kind}"
    is_over, stop_at = False, 0
    while not is_over:
        stop_at += 1
        shutil.rmtree(job.folder, ignore_errors=True)
        shutil.copytree(ready, job.folder)
        stop = Stop(stop_at, error)
        with monkeypatch.context() as patch:
            patch.setattr(durable_io, "on_step", stop)
            try:
                job.merge(remove_shards=True)
            except (Died, OutputError):
                assert stop.num_steps >= stop_at
            is_over = stop.num_steps < stop_at
        if any(path.exists() for path in _files(job.output)):
            assert content(job.output)["row_index"].to_pylist() == list(range(10))
        job.merge(remove_shards=True)
        assert content(job.output)["row_index"].to_pylist() == list(range(10))
        assert not any("shard" in name for name in names(job.folder))
    print(f"{stop_at} steps")
    assert stop_at > 40


def test_many_files_are_not_all_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_output, "MAX_OPEN_FILES", 2)
    job = Job(tmp_path, "out.parquet")
    job.run_all(5)
    job.merge()
    assert content(job.output)["id"].to_pylist() == list(range(50))


def test_the_command(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.run_all(2)
    assert main(["merge", job.output, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 50
    assert main(["merge", job.output, "--remove-shards"]) == 0
    assert "rows     50: 44 ok, 6 failed (6 empty_prompt)" in capsys.readouterr().err
    assert main(["merge", job.output, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    job.run("0/2")
    assert main(["merge", job.output]) == 2
    job.run("1/2", max_tokens=9)
    assert main(["merge", job.output, "--overwrite"]) == 3
    assert "sampling differ" in capsys.readouterr().err
