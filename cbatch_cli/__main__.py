"""The process of the command line."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from cbatch_cli.cli import main


def run() -> NoReturn:
    """Run the command line and end the process, whose modules are not taken apart first.

    Python would spend a second on the objects of torch and transformers. By now every file is
    closed and every child process has ended.
    """
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
