"""SIGKILL at every named step and at random times: no row is lost, double or changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.fork_server import ForkServer
from tests.crash.reader import Reader
from tests.crash.store import Counts, Store

MOST_STEPS = 1000


@pytest.fixture(scope="module")
def counts(tally: Callable[[str], None]) -> Iterator[Counts]:
    counts = Counts()
    yield counts
    tally(f"kills: {counts}")
    assert counts.half_files == 0


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def is_directory(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_kill_at_every_step_of_a_first_run(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    def new_store(folder: Path) -> Store:
        return Store(server, folder, is_directory=is_directory, counts=counts)

    assert _kill_at_every_step(new_store, tmp_path) > 80


def test_a_kill_at_every_step_of_a_run_that_resumes(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    begun = Store(server, tmp_path / "begun", is_directory=is_directory, counts=counts)
    # Dies with one part complete, the next one half written, and rows in the journal.
    at = _step_of(begun, tmp_path / "probe", "before write", "part-00001.parquet.tmp")
    begun.run(kill_at_step=at)
    assert len(begun.history.kept) >= begun.rows_per_part
    assert _kill_at_every_step(begun.copy, tmp_path) > 60


def _kill_at_every_step(make_store: Callable[[Path], Store], folder: Path) -> int:
    """Kill a run of a new store at its step 0, at its step 1, and so on until a run ends.

    Returns the number of that run's last try.
    """
    for at in range(MOST_STEPS):
        store = make_store(folder / str(at))
        outcome = store.run(kill_at_step=at)
        store.check_whole()
        store.finish()
        if not outcome.was_killed:
            assert outcome.exit_code == 0
            break
    return at


def _step_of(store: Store, folder: Path, step: str, name: str) -> int:
    """The number of a step in an undisturbed run of the same job."""
    probe = store.copy(folder)
    probe.run(trace=True)
    lines = (folder / "trace.log").read_text().splitlines()
    return next(i for i, line in enumerate(lines) if step in line and name in line)


def test_kills_at_random_times(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    _kill_at_random(server, tmp_path, is_directory, counts, num_jobs=4, seed=1)


@pytest.mark.crash_long
def test_two_thousand_kills_at_random_times(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    before = counts.kills
    for seed in range(2, 1000):
        _kill_at_random(server, tmp_path / str(seed), is_directory, counts, num_jobs=4, seed=seed)
        if counts.kills - before >= 1000:
            break


def _kill_at_random(
    server: ForkServer,
    tmp_path: Path,
    is_directory: bool,
    counts: Counts,
    *,
    num_jobs: int,
    seed: int,
) -> None:
    """Kill each job again and again until it happens to end."""
    rng = random.Random(seed)
    for number in range(num_jobs):
        store = Store(
            server,
            tmp_path / str(number),
            is_directory=is_directory,
            counts=counts,
            num_rows=rng.randint(20, 120),
            rows_per_part=rng.choice((7, 20, 1000)),
        )
        with Reader(store):
            while not _is_over(store, rng):
                _spoil_journal(store, rng)
        store.check_output()


def _is_over(store: Store, rng: random.Random) -> bool:
    """Whether the next run has ended by itself."""
    outcome = (
        store.run(kill_after_s=rng.uniform(0.02, 0.4), step_s=0.002)
        if rng.random() < 0.8
        else store.run(signal_after_s=rng.uniform(0.05, 0.4), step_s=0.002)
    )
    assert outcome.exit_code in (0, -9, -15, 143), store.errors
    return outcome.exit_code == 0


def _spoil_journal(store: Store, rng: random.Random) -> None:
    """Append what a file system may leave behind the end of a file that was being written."""
    segments = sorted(store.target.work_dir.glob("journal-*.bin"))
    if segments and rng.random() < 0.5:
        size = rng.randint(1, 5000)
        with segments[-1].open("ab") as file:
            file.write(rng.choice((bytes(size), rng.randbytes(size))))
