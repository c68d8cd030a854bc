"""The process of the command line."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import NoReturn

from cbatch_cli.cli import main

# Loading torch, transformers and a model makes a million objects that stay. With Python's own
# thresholds the collector goes through them again and again, for a second and a half in all.
_GC_THRESHOLDS = (50_000, 20, 100)

# How often a thread of OpenMP looks whether the others are done before it sleeps. By itself it
# looks for milliseconds, on the very core that they wait for when another process takes theirs.
_OPENMP_SPINS = "5000"
_OPENMP_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def run() -> NoReturn:
    """Run the command line and end the process, whose modules are not taken apart first.

    That would take another second. By then every file is closed and every child has ended.
    """
    gc.set_threshold(*_GC_THRESHOLDS)
    # Read when torch is loaded, which is later.
    if not any(name in os.environ for name in _OPENMP_SETTINGS):
        os.environ["GOMP_SPINCOUNT"] = _OPENMP_SPINS
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
