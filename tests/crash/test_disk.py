"""The images of power failures themselves: what was synced is in each of them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.crash.child import SHADOW
from tests.crash.power import Disk


@pytest.mark.parametrize("seed", range(20))
def test_two_threads_sync_a_folder_and_the_later_ends_first(tmp_path: Path, seed: int) -> None:
    store = tmp_path / "store"
    store.mkdir()
    disk = Disk(tmp_path, store)
    lines: list[str] = []

    def note(thread: int, step: str, path: Path) -> None:
        status = path.stat() if path.exists() else None
        inode, size = (status.st_ino, status.st_size) if status is not None else (0, 0)
        lines.append(json.dumps([step, str(path), inode, size, "", thread]))

    def make(thread: int, name: str) -> None:
        path = store / name
        note(thread, "before open", path)
        path.touch()
        os.link(path, tmp_path / SHADOW / str(path.stat().st_ino))
        note(thread, "after open", path)

    make(1, "first")
    note(1, "before fsync dir", store)
    make(2, "second")
    note(2, "before fsync dir", store)
    note(2, "after fsync dir", store)
    make(2, "third")
    (tmp_path / "trace.log").write_text("\n".join(lines) + "\n")
    disk.fail_power(random.Random(seed))
    assert {"first", "second"} <= set(os.listdir(store)) <= {"first", "second", "third"}


def test_what_was_not_synced_may_be_lost(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    found = set()
    for seed in range(20):
        folder = tmp_path / str(seed)
        store = folder / "store"
        store.mkdir(parents=True)
        disk = Disk(folder, store)
        path = store / "file"
        path.touch()
        inode = path.stat().st_ino
        os.link(path, folder / SHADOW / str(inode))
        steps = [("before open", 0), ("after open", inode)]
        lines = [json.dumps([step, str(path), number, 0, "", 1]) for step, number in steps]
        (folder / "trace.log").write_text("\n".join(lines) + "\n")
        disk.fail_power(random.Random(seed))
        found.add(path.exists())
    assert found == {True, False}
