"""The oldest versions of torch and transformers that we allow run the tests of models too."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = ("tests/models", "tests/test_doctor.py")


def oldest(package: str) -> str:
    """The version that the project's requirements begin with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = (
        match[1]
        for requirement in project["dependencies"]
        if (match := re.fullmatch(rf"{package}>=([\d.]+)", requirement))
    )
    return str(version)


@pytest.mark.slow
def test_the_oldest_versions_run_the_tests_of_models() -> None:
    """`OLD_PYTHON` is an interpreter that has them, and this checkout, installed."""
    python = os.environ.get("OLD_PYTHON")
    if python is None:
        pytest.skip("OLD_PYTHON names no interpreter")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for package in ("torch", "transformers"):
        command = [python, "-c", f"import {package}; print({package}.__version__)"]
        installed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert installed.startswith(f"{oldest(package)}.")
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
