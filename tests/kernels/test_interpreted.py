"""Runs the interpreted tests, each file in a process of its own.

triton decides on interpretation when it is imported, and a kernel that reads what is not its own
may take its process down.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def test_importing_needs_neither_triton_nor_a_driver() -> None:
    names = [path.stem for path in (ROOT / "kernels").glob("*.py")]
    statement = "import sys\nsys.modules['triton'] = None\n"
    statement += "\n".join(
        f"import cbatch_kernels.{name}" for name in sorted(names) if not name.endswith("_jit")
    )
    statement += "\nfrom cbatch_cli.attention import backend, triton_backend\n"
    statement += "import torch\nassert not torch.cuda.is_initialized()"
    command = [sys.executable, "-c", statement]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
