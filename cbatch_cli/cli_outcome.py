"""What a command leaves behind: data on stdout, one line on stderr if it fails, an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cbatch_cli.errors import CBatchError

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_ROW_ERRORS = 4
EXIT_ROWS_DIFFER = 4
EXIT_INTERRUPTED = 130


def guarded(action: Callable[[], int], *, verbose: bool) -> int:
    """The exit status of `action`, with what it raises told in one line on stderr."""
    with warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            return action()
        except (Exception, KeyboardInterrupt) as error:
            if verbose:
                traceback.print_exc()
            status, message = _explain(error)
            hint = " (-v shows the traceback)" if status == EXIT_INTERNAL and not verbose else ""
            print_error(message + hint)
            return status


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit status that `error` stands for, and what to say about it."""
    if isinstance(error, CBatchError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    return EXIT_INTERNAL, f"internal error: {type(error).__name__}: {error}"


def print_error(message: str) -> None:
    """Say on stderr, in one line, why the command fails."""
    line = " ".join(message.split())
    print(f"cbatch: error: {line}", file=sys.stderr)


def json_text(value: Mapping[str, Any]) -> str:
    """`value` as one line."""
    import orjson

    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE).decode()


def print_data(text: str) -> None:
    """Write to stdout; a reader that has gone away changes nothing about the run."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()
