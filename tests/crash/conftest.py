"""One server for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.fork_server import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running
