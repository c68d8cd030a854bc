"""The journal of a running job: what is written when, and what survives."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.data import durable_io, journal
from cbatch_cli.data.journal import Journal
from cbatch_cli.data.journal_records import segment_name
from cbatch_cli.data.journal_replay import replay
from cbatch_cli.errors import OutputError
from tests.data.output_fakes import make_result, make_row

WAIT_S = 20
"""How long a test waits for what must come; it waits so long only if it is broken."""


def append(target: Journal, *indices: int) -> None:
    for index in indices:
        row = make_row(index)
        target.append_result(index, index.to_bytes(16, "big"), make_result(row))


def finished(folder: Path) -> list[int]:
    """Indices of the rows that the journal in `folder` gives back, each checked."""
    replayed = replay(folder)
    for index in replayed.results:
        entry = replayed.result(index)
        assert entry is not None
        assert entry.content_hash == index.to_bytes(16, "big")
        assert entry.result == make_result(make_row(index))
    return sorted(replayed.results)


def segments(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("journal-"))


class Durable:
    """Collects what the journal says is durable."""

    def __init__(self, expected: int = 0) -> None:
        self.rows: list[int] = []
        self._expected = expected
        self._is_reached = threading.Event()

    def __call__(self, rows: Sequence[int]) -> None:
        self.rows += rows
        if len(self.rows) >= self._expected:
            self._is_reached.set()

    def wait(self) -> None:
        assert self._is_reached.wait(WAIT_S)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Whoever waits for a thread that never comes fails instead of waiting on."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError("the journal hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(WAIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def never_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SYNC_INTERVAL_S", 1e6)


def test_a_row_is_with_the_system_when_append_returns(
    tmp_path: Path, never_by_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Path] = []
    running = Journal.open(tmp_path)
    monkeypatch.setattr(
        durable_io, "on_step", lambda step, path: writes.append(path) if step[-5:] == "write" else 0
    )
    for index in range(20):
        append(running, index)
        assert finished(tmp_path) == list(range(index + 1))
    running.append_partial(30, bytes(16), [1, 2], attempt=1)
    assert replay(tmp_path).partials[30].token_ids == (1, 2)
    assert len(writes) == 2 * 21
    assert running.num_durable == 0
    running.close()
    running.close()


def test_rows_are_synced_every_so_many(tmp_path: Path, never_by_time: None) -> None:
    durable = Durable(journal.SYNC_ROWS)
    running = Journal.open(tmp_path, on_durable=durable)

    append(running, 0)
    time.sleep(0.05)  # lets the thread see one row and wait for more
    append(running, *range(1, journal.SYNC_ROWS))
    durable.wait()
    append(running, 1000)
    assert durable.rows == list(range(journal.SYNC_ROWS))
    running.close()

    assert durable.rows == [*range(journal.SYNC_ROWS), 1000]
    assert running.num_durable == journal.SYNC_ROWS + 1


def test_a_lonely_row_is_synced_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SYNC_INTERVAL_S", 0.01)
    durable = Durable(1)
    running = Journal.open(tmp_path, on_durable=durable)

    append(running, 5)
    durable.wait()

    assert durable.rows == [5]
    running.close()


def test_sync_waits_until_all_is_durable(tmp_path: Path, never_by_time: None) -> None:
    durable = Durable()
    running = Journal.open(tmp_path, on_durable=durable)
    running.sync()
    append(running, 1, 2)
    running.append_partial(3, bytes(16), [4], attempt=2)
    running.sync()

    assert durable.rows == [1, 2]
    assert running.num_durable == 2
    running.close()


def test_a_slow_device_makes_appends_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SYNC_ROWS", 2)
    monkeypatch.setattr(journal, "MAX_UNSYNCED_ROWS", 6)
    may_sync = threading.Event()
    running = Journal.open(tmp_path)

    def block(step: str, path: Path) -> None:
        if step == "before fsync":
            assert may_sync.wait(WAIT_S)

    monkeypatch.setattr(durable_io, "on_step", block)
    append(running, *range(6))
    appender = threading.Thread(target=append, args=(running, 6))
    appender.start()
    appender.join(0.05)
    assert appender.is_alive()
    assert finished(tmp_path) == list(range(6))

    may_sync.set()
    appender.join(WAIT_S)
    assert not appender.is_alive()
    assert finished(tmp_path) == list(range(7))
    running.close()


def test_each_start_writes_a_segment_of_its_own(tmp_path: Path) -> None:
    first = Journal.open(tmp_path)
    append(first, 1)
    first.close()
    path = tmp_path / segment_name(1)
    damaged = path.read_bytes() + b"\x07\x00"
    path.write_bytes(damaged)

    second = Journal.open(tmp_path)
    assert sorted(second.recovered.results) == [1]
    append(second, 2)
    second.close()

    assert segments(tmp_path) == [segment_name(1), segment_name(2)]
    assert path.read_bytes() == damaged
    assert finished(tmp_path) == [1, 2]


def test_starts_that_finish_nothing_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(5):
        Journal.open(tmp_path).close()

    assert segments(tmp_path) == [segment_name(5)]


def test_a_segment_goes_when_all_its_rows_are_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Journal.open(tmp_path)
    append(old, 0, 1, 5)
    old.append_partial(9, bytes(16), [1], attempt=1)
    old.close()
    running = Journal.open(tmp_path)
    append(running, 2, 3)
    first, second = segment_name(1), segment_name(2)

    running.drop(range(0, 4))
    assert segments(tmp_path) == [first, second]
    running.drop(range(4, 8))
    assert segments(tmp_path) == [first, second]
    running.drop(range(8, 12))
    assert segments(tmp_path) == [second]
    running.close()


def test_a_long_segment_is_followed_by_another(
    tmp_path: Path, never_by_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    durable = Durable()
    running = Journal.open(tmp_path, on_durable=durable)
    for index in range(30):
        append(running, index)
        if index % 10 == 9:
            running.sync()

    assert segments(tmp_path) == [segment_name(number) for number in (1, 2, 3, 4)]
    assert finished(tmp_path) == list(range(30))
    assert durable.rows == list(range(30))
    running.drop(range(0, 20))
    assert segments(tmp_path) == [segment_name(3), segment_name(4)]
    running.close()


def fail_at(step: str, *, number: int) -> tuple[list[Path], durable_io.StepHook]:
    """A hook that lets the `number`-th step of that name fail, and the paths of all of them."""
    paths: list[Path] = []

    def hook(name: str, path: Path) -> None:
        if name == f"before {step}":
            paths.append(path)
            if len(paths) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    return paths, hook


def test_a_failed_sync_is_told_and_never_tried_again(
    tmp_path: Path, never_by_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = Durable()
    running = Journal.open(tmp_path, on_durable=durable)
    append(running, 1)
    running.sync()
    syncs, hook = fail_at("fsync", number=1)
    monkeypatch.setattr(durable_io, "on_step", hook)

    append(running, 2)
    with pytest.raises(OutputError, match=f"cannot fsync {tmp_path}"):
        running.sync()
    for call in (running.sync, lambda: append(running, 3), lambda: running.drop(range(9))):
        with pytest.raises(OutputError):
            call()
    running.close()

    assert len(syncs) == 1
    assert durable.rows == [1]
    assert finished(tmp_path) == [1, 2]


def test_close_tells_of_a_failure_that_nobody_has_seen(
    tmp_path: Path, never_by_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Journal.open(tmp_path)
    append(running, 1)
    _, hook = fail_at("fsync", number=1)
    monkeypatch.setattr(durable_io, "on_step", hook)

    with pytest.raises(OutputError, match="cannot fsync"):
        running.close()
    running.close()


def test_a_failing_listener_is_not_a_silent_end(tmp_path: Path) -> None:
    def fail(rows: Sequence[int]) -> None:
        raise ZeroDivisionError

    running = Journal.open(tmp_path, on_durable=fail)
    append(running, 1)

    with pytest.raises(ZeroDivisionError):
        running.sync()
    running.close()


def test_a_waiting_append_hears_of_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SYNC_ROWS", 2)
    monkeypatch.setattr(journal, "MAX_UNSYNCED_ROWS", 2)
    running = Journal.open(tmp_path)
    _, hook = fail_at("fsync", number=1)
    monkeypatch.setattr(durable_io, "on_step", hook)

    with pytest.raises(OutputError, match="cannot fsync"):
        append(running, *range(3))
    running.close()


def test_nothing_is_written_behind_a_failed_write_and_the_rest_is_saved(
    tmp_path: Path, never_by_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = Durable()
    running = Journal.open(tmp_path, on_durable=durable)
    append(running, 1, 2)
    writes: list[int] = []
    write = os.write

    def fill_up(fd: int, data: bytes) -> int:
        writes.append(len(data))
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, bytes(data[:10]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill_up)
        with pytest.raises(OutputError, match="No space left"):
            append(running, 3)
    size = (tmp_path / segment_name(1)).stat().st_size
    with pytest.raises(OutputError, match="No space left"):
        append(running, 4)
    running.close()

    assert (tmp_path / segment_name(1)).stat().st_size == size
    assert durable.rows == [1, 2]
    assert finished(tmp_path) == [1, 2]


def test_a_journal_that_cannot_start_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("list", "open", "write", "fsync", "fsync dir"):
        folder = tmp_path / step
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(durable_io, "on_step", fail_at(step, number=1)[1])
            with pytest.raises(OutputError, match=f"cannot {step} "):
                Journal.open(folder)
        Journal.open(folder).close()


def test_kill_9_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from cbatch_cli.data import journal; from tests.data.test_journal import append\n"
        "journal.SYNC_INTERVAL_S = 1e6\n"
        "running = journal.Journal.open(Path(sys.argv[1]))\n"
        "append(running, *range(40)); os.kill(os.getpid(), signal.SIGKILL)"
    )

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)

    assert done.returncode == -signal.SIGKILL
    assert finished(tmp_path) == list(range(40))


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(0, 60),
    sync_rows=st.integers(1, 9),
    segment_bytes=st.sampled_from([400, 2000, 2**20]),
)
def test_a_power_failure_keeps_what_was_called_durable(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    num_rows: int,
    sync_rows: int,
    segment_bytes: int,
) -> None:
    """Each file is cut back to its last sync plus some of the rest, which may be garbage."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("journal")
    durable = Durable()
    synced: dict[Path, int] = {}
    sizes: dict[Path, int] = {}

    def watch(step: str, path: Path) -> None:
        if step == "before fsync":
            sizes[path] = path.stat().st_size
        elif step == "after fsync":
            synced[path] = sizes[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_io, "on_step", watch)
        patch.setattr(journal, "SYNC_ROWS", sync_rows)
        patch.setattr(journal, "SYNC_INTERVAL_S", 1e6)
        patch.setattr(journal, "SEGMENT_BYTES", segment_bytes)
        running = Journal.open(folder, on_durable=durable)
        for index in range(num_rows):
            append(running, index)
            if rng.random() < 0.1:
                running.sync()
        called_durable = set(durable.rows)
        images = {path: path.read_bytes() for path in folder.iterdir()}
        kept = dict(synced)
        running.close()
    for path, image in images.items():
        size = rng.randint(kept.get(path, 0), len(image))
        tail = rng.randbytes(len(image) - size) if rng.random() < 0.5 else b""
        path.write_bytes(image[:size] + tail)
    for path in set(folder.iterdir()) - images.keys():
        path.unlink()

    assert called_durable <= set(finished(folder)) <= set(range(num_rows))


class Killed(BaseException):
    """The process is gone: nothing after it may touch a file."""


def test_a_kill_at_any_step_keeps_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 600)
    monkeypatch.setattr(journal, "SYNC_INTERVAL_S", 1e6)

    def run(folder: Path, at: int) -> tuple[int, list[int]]:
        """Stop at step `at`; returns the number of steps taken and the rows appended."""
        folder.mkdir()
        num_steps = 0
        appended: list[int] = []

        def stop(step: str, path: Path) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps > at:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(durable_io, "on_step", stop)
            try:
                running = Journal.open(folder)
                for index in range(8):
                    append(running, index)
                    appended.append(index)
                    if index % 2:
                        running.sync()
                    if index == 5:
                        running.drop(range(0, 2))
                running.close()
            except Killed:
                pass
        return num_steps, appended

    num_steps, appended = run(tmp_path / "whole", 10**6)
    assert appended == list(range(8))
    assert finished(tmp_path / "whole") == list(range(2, 8))
    for at in range(num_steps):
        folder = tmp_path / str(at)
        _, appended = run(folder, at)
        is_dropped = not set(range(2)) <= set(finished(folder)) and len(appended) >= 6
        assert set(appended) - set(range(2) if is_dropped else ()) <= set(finished(folder))
