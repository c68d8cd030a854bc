"""The work directory and its lock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cbatch_cli.data import durable_io
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import OutputError, OutputLockedError, ResumeMismatchError


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet.cbatch"
    with WorkDir(path):
        with pytest.raises(OutputLockedError, match=rf"{path} .*process {os.getpid()}\)"):
            WorkDir(path)
        assert (path / "lock").exists()

    with WorkDir(path):
        pass


def test_a_run_that_stored_nothing_leaves_nothing(tmp_path: Path) -> None:
    work_dir = WorkDir(tmp_path / "work")
    work_dir.close()
    work_dir.close()

    assert os.listdir(tmp_path) == []


def test_the_run_is_stored_whatever_it_holds(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "work") as work_dir:
        work_dir.write_run({"first": 1})
        work_dir.write_run({"path": Path("x"), "nan": float("nan"), "inputs": ("a\udcff", "b")})

    assert os.listdir(tmp_path / "work") == ["run.json"]
    run = json.loads((tmp_path / "work" / "run.json").read_bytes())
    assert run == {"format": 1, "path": "x", "nan": None, "inputs": ["a\udcff", "b"]}
    with WorkDir(tmp_path / "work") as work_dir:
        assert work_dir.read_run() == run


def test_a_run_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "work") as work_dir:
        assert work_dir.read_run() is None and not work_dir.has_run
        path = tmp_path / "work" / "run.json"
        for damaged in (b"", b"{", b"[]", b"\xff", b"{}" + bytes(9)):
            path.write_bytes(damaged)
            with pytest.raises(OutputError, match=r"run\.json is damaged.*--overwrite"):
                work_dir.read_run()
        path.write_bytes(b'{"format": 2}')
        with pytest.raises(ResumeMismatchError, match="another version"):
            work_dir.read_run()
        path.unlink()
        path.mkdir()
        with pytest.raises(OutputError, match="cannot read"):
            work_dir.read_run()


def test_a_directory_that_its_owner_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_locks = 0

    def remove_first(step: str, path: Path) -> None:
        nonlocal num_locks
        if step == "before lock":
            num_locks += 1
            if num_locks == 1:
                path.parent.rmdir()

    monkeypatch.setattr(durable_io, "on_step", remove_first)
    with WorkDir(tmp_path / "work"):
        assert os.listdir(tmp_path / "work") == ["lock"]
    assert num_locks == 2


def test_starting_over_removes_what_is_ours_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.mkdir()
    for name in (
        "part-00000.parquet",
        "part-00001.parquet.tmp",
        "part-00002.parquet.scratch.tmp",
        "out.parquet.tmp",
        "journal-000001.bin",
        "run.json",
        "notes.txt",
    ):
        (path / name).touch()

    with WorkDir(path) as work_dir:
        work_dir.discard_unfinished()
        kept = ["journal-000001.bin", "lock", "notes.txt", "part-00000.parquet", "run.json"]
        assert sorted(os.listdir(path)) == kept
        work_dir.discard_work()
        assert sorted(os.listdir(path)) == ["lock", "notes.txt", "run.json"]
        work_dir.start_over()
        assert sorted(os.listdir(path)) == ["lock", "notes.txt"]
