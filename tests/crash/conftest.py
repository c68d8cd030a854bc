"""One server for all tests of a session, and what they count, shown at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.crash.fork_server import ForkServer

_TALLY = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes lines that are printed after the results of all tests."""
    return request.config.stash.setdefault(_TALLY, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_TALLY, [])
    if lines:
        terminalreporter.write_sep("=", "what the crash tests did")
    for line in lines:
        terminalreporter.write_line(line)
