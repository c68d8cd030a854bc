"""Settings of all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

from cbatch_cli import cpu_defaults

# A machine that is busy is not wrong.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def no_measured_defaults(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody measured on this machine is not what tests expect."""
    folder = Path(tmp_path_factory.getbasetemp()) / "no-cpu-defaults"
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: folder)
