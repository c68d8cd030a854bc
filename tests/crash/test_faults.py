"""The operating system fails: the N-th step of each kind, for every N until a run does not get
that far, once or from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from cbatch_cli.errors import OutputError
from tests.crash.fork_server import ForkServer
from tests.crash.store import Counts, Store

KINDS = (
    "write",
    "fsync",
    "fsync dir",
    "rename",
    "open",
    "unlink",
    "mkdir",
    "rmdir",
    "list",
    "lock",
)
MOST = 200


@pytest.fixture(scope="module")
def counts(tally: Callable[[str], None]) -> Iterator[Counts]:
    counts = Counts()
    yield counts
    tally(f"faults: {counts}")


@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_may_fail(
    server: ForkServer,
    tmp_path: Path,
    counts: Counts,
    kind: str,
    is_lasting: bool,
    is_directory: bool,
) -> None:
    codes = cycle(("ENOSPC", "EIO", "EROFS"))
    for number in range(MOST):
        fault = {"kind": kind, "number": number, "code": next(codes), "is_lasting": is_lasting}
        if not _fail(server, tmp_path / str(number), counts, fault, is_directory=is_directory):
            break
    assert 0 < number < MOST


@pytest.mark.crash_long
@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EROFS"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_may_fail_in_every_way(
    server: ForkServer,
    tmp_path: Path,
    counts: Counts,
    kind: str,
    code: str,
    is_lasting: bool,
    is_directory: bool,
) -> None:
    for number in range(MOST):
        fault = {"kind": kind, "number": number, "code": code, "is_lasting": is_lasting}
        if not _fail(server, tmp_path / str(number), counts, fault, is_directory=is_directory):
            break


def test_a_write_may_stop_half_way(server: ForkServer, tmp_path: Path, counts: Counts) -> None:
    for number in range(MOST):
        fault = {
            "kind": "write",
            "number": number,
            "code": "ENOSPC",
            "is_lasting": True,
            "is_half": True,
        }
        if not _fail(server, tmp_path / str(number), counts, fault, is_directory=False):
            break
    assert number > 15


def _fail(
    server: ForkServer,
    folder: Path,
    counts: Counts,
    fault: dict[str, object],
    *,
    is_directory: bool,
) -> bool:
    """Run into one fault and recover; whether the run got that far."""
    store = Store(server, folder, is_directory=is_directory, counts=counts)
    outcome = store.run(fault=fault)
    is_met = (folder / "fault_met").exists()
    counts.faults += is_met
    # A step after the answers are in place may fail without harm.
    assert outcome.exit_code in ((OutputError.exit_code, 0) if is_met else (0,)), store.errors
    store.check_whole()
    if outcome.exit_code == 0:
        store.check_answers()
    store.finish()
    return is_met
