"""The work directory and its lock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import OutputLockedError


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
    assert run == {"path": "x", "nan": None, "inputs": ["a\udcff", "b"]}


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
        work_dir.start_over()
        assert sorted(os.listdir(path)) == ["lock", "notes.txt", "run.json"]
