"""The steps by which the output side changes the file system."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.errors import OutputError


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    taken: list[tuple[str, str]] = []
    monkeypatch.setattr(durable_io, "on_step", lambda step, path: taken.append((step, path.name)))
    return taken


def test_a_durable_write_takes_its_steps_in_the_order_that_survives_power_loss(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    durable_io.write_durably(tmp_path / "run.json", b"{}")

    done = [(step.removeprefix("after "), name) for step, name in steps if step[0] == "a"]
    assert done == [
        ("unlink", "run.json.tmp"),
        ("open", "run.json.tmp"),
        ("write", "run.json.tmp"),
        ("fsync", "run.json.tmp"),
        ("rename", "run.json"),
        ("fsync dir", tmp_path.name),
    ]
    assert [step for step, _ in steps[:4]] == [
        *["before unlink", "after unlink", "before open", "after open"]
    ]
    assert os.listdir(tmp_path) == ["run.json"]
    assert (tmp_path / "run.json").read_bytes() == b"{}"


def test_every_folder_on_the_way_is_made_and_its_name_synced(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    durable_io.make_dir(tmp_path / "a" / "b")

    assert (tmp_path / "a" / "b").is_dir()
    assert [entry for entry in steps if entry[0].startswith("after")] == [
        ("after mkdir", "a"),
        ("after fsync dir", tmp_path.name),
        ("after mkdir", "b"),
        ("after fsync dir", "a"),
    ]


def test_all_is_written_though_the_system_takes_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))

    with DurableFile(tmp_path / "file") as file:
        assert file.write(b"0123456789") == 10
        assert file.tell() == 10

    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_file_that_exists_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    with pytest.raises(OutputError, match="cannot open .*file: File exists"):
        DurableFile(tmp_path / "file")

    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename", "fsync dir"])
def test_a_failing_step_becomes_an_output_error_naming_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(name: str, path: Path) -> None:
        if name == f"before {step}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

    monkeypatch.setattr(durable_io, "on_step", fail)

    with pytest.raises(OutputError, match=f"cannot {step} {tmp_path}.*No space left") as caught:
        durable_io.write_durably(tmp_path / "file", b"data")

    assert isinstance(caught.value.__cause__, OSError)


def test_a_folder_that_cannot_be_synced_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, "not for folders")

    monkeypatch.setattr(os, "fsync", refuse)

    durable_io.fsync_dir(tmp_path)


def test_a_lock_is_taken_once_and_freed_by_death(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from cbatch_cli.data import durable_io\n"
        "print(durable_io.lock(Path(sys.argv[1])) is not None, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert durable_io.lock(path) is None
        assert path.read_text() == str(holder.pid)
        holder.kill()
        holder.wait()

    fd = durable_io.lock(path)
    assert fd is not None
    assert path.read_text() == str(os.getpid())
    os.close(fd)


def test_a_lock_on_a_removed_file_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner leaves, removing the file, just after the next one has opened it."""
    path = tmp_path / "lock"
    flock = durable_io.fcntl.flock
    removed = []

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        flock(fd, operation)

    monkeypatch.setattr(durable_io.fcntl, "flock", remove_first)

    fd = durable_io.lock(path)

    assert fd is not None
    assert os.path.samestat(os.fstat(fd), os.stat(path))
    os.close(fd)


def test_asking_for_a_lock_makes_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not durable_io.is_locked(path)
    assert not durable_io.is_locked(tmp_path / "no" / "where")
    assert list(tmp_path.iterdir()) == []

    fd = durable_io.lock(path)
    assert fd is not None
    assert durable_io.is_locked(path)
    assert durable_io.is_locked(path)
    os.close(fd)
    assert not durable_io.is_locked(path)
    assert path.read_text() == str(os.getpid())
    assert not durable_io.is_locked(path / "below")


def test_a_lock_that_is_free_in_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    asking = os.open(path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:
            os.close(asking)

    monkeypatch.setattr("time.sleep", sleep)
    fd = durable_io.lock(path)
    assert fd is not None and len(sleeps) == 2
    os.close(fd)
