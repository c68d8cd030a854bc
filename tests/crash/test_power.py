"""Power failures: what is lost is less than a window of rows, and what was durable stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cbatch_cli.data.journal import MAX_UNSYNCED_ROWS
from tests.crash.fork_server import ForkServer
from tests.crash.power import Disk
from tests.crash.store import Counts, Store


@pytest.fixture(scope="module")
def counts(tally: Callable[[str], None]) -> Iterator[Counts]:
    counts = Counts()
    yield counts
    tally(f"power failures: {counts}")


@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "folder"])
def test_images_of_power_failures(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    before = counts.images
    for seed in range(1000):
        _fail_until_done(server, tmp_path / str(seed), is_directory, counts, seed)
        if counts.images - before >= 100:
            break


@pytest.mark.crash_long
@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "folder"])
def test_two_thousand_images(
    server: ForkServer, tmp_path: Path, is_directory: bool, counts: Counts
) -> None:
    before = counts.images
    for seed in range(1000, 10_000):
        _fail_until_done(server, tmp_path / str(seed), is_directory, counts, seed)
        if counts.images - before >= 1000:
            break


def _fail_until_done(
    server: ForkServer, folder: Path, is_directory: bool, counts: Counts, seed: int
) -> None:
    """Stop a job at random steps, most times with the power, until it happens to end."""
    rng = random.Random(seed)
    num_rows = rng.choice((10, 40, 150))
    store = Store(
        server,
        folder,
        is_directory=is_directory,
        counts=counts,
        num_rows=num_rows,
        rows_per_part=rng.choice((4, 20, 1000)),
    )
    disk = Disk(folder, store.store)
    # As the run's own: a limit on how often it may be stopped keeps the harness from going on
    # for ever where no run ever makes progress.
    for _ in range(12):
        outcome = store.run(trace=True, kill_at_step=rng.randint(20, 60 + 4 * num_rows))
        assert outcome.exit_code in (0, -9), store.errors
        is_over = outcome.exit_code == 0
        if is_over:
            store.check_output()
        if rng.random() < 0.8:
            disk.fail_power(rng)
            store.history.fail_power()
            counts.images += 1
            store.check_whole()
        if is_over:
            break
    store.finish()
    assert counts.most_rows_lost <= MAX_UNSYNCED_ROWS
