"""Two runs that want the same output at the same time: one of them gets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cbatch_cli.errors import OutputLockedError
from tests.crash.fork_server import ForkServer, Run
from tests.crash.store import Counts, Store

NUM_RACES = 100


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    with ForkServer() as one, ForkServer() as other:
        yield one, other


def test_one_of_two_wins(
    servers: tuple[ForkServer, ForkServer], tmp_path: Path, tally: Callable[[str], None]
) -> None:
    counts = Counts()
    ends: Counter[tuple[int, ...]] = Counter()
    for number in range(NUM_RACES):
        folder = tmp_path / str(number)
        store = Store(servers[0], folder, is_directory=number % 2 == 1, counts=counts)
        runs = []
        for name in ("one", "other"):
            (folder / name).mkdir()
            runs.append(
                Run(
                    folder=str(folder / name),
                    options=store.options,
                    barrier=str(folder / "go"),
                    # The winner waits until the other has found out.
                    hold=str(folder / "one_is_done"),
                )
            )
        for server, run in zip(servers, runs, strict=True):
            server.start(run)
        (folder / "go").touch()
        while not any(server.is_done() for server in servers):
            pass
        (folder / "one_is_done").touch()
        outcomes = [server.wait() for server in servers]
        assert not any(outcome.is_hung for outcome in outcomes)
        codes = sorted(outcome.exit_code for outcome in outcomes)
        given = [_given(folder / name) for name in ("one", "other")]
        assert max(given) == sum(given) > 0
        ends[tuple(codes)] += 1
        store.check_whole()
        assert store.num_rows == len(store.answers())
    tally(f"races: {NUM_RACES}, exit codes {dict(ends)}")
    assert ends == {(0, OutputLockedError.exit_code): NUM_RACES}


def _given(folder: Path) -> int:
    path = folder / "rows.log"
    return path.read_text().count('"given"') if path.exists() else 0
