"""Copies of inputs that can be read only once: stdin and named pipes."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.errors import UsageError

CHUNK_BYTES = 2**20
SPOOL_SUFFIX = ".spool"


def spool_stdin(spool_dir: Path | None) -> Path:
    """Copy all of stdin to a file that survives the process, and return its path.

    Where stdin gives nothing (a terminal, or end of file at once), the copy that an earlier run
    has left is used. Without `spool_dir` the copy is temporary. Raises `UsageError` on a terminal
    without such a copy.
    """
    path = (spool_dir or _temporary_dir()) / f"stdin{SPOOL_SUFFIX}"
    if sys.stdin is None or sys.stdin.isatty():
        if path.exists():
            return path
        raise UsageError("stdin (-) is a terminal: pipe the rows into cbatch")
    _spool(sys.stdin.buffer, "stdin", path)
    return path


def spool_pipe(pipe: Path, number: int, spool_dir: Path | None) -> Path:
    """Copy all that comes through a named pipe, the input `number` of the run, to a file."""
    path = (spool_dir or _temporary_dir()) / f"pipe-{number}{SPOOL_SUFFIX}"
    with pipe.open("rb") as stream:
        _spool(stream, str(pipe), path)
    return path


def discard_spools(spool_dir: Path) -> None:
    """Remove the copies; for when no run will want to read them again."""
    for path in sorted(spool_dir.glob(f"*{SPOOL_SUFFIX}")):
        durable_io.unlink(path)


def _spool(stream: BinaryIO, name: str, path: Path) -> None:
    chunk = _read(stream, name)
    if not chunk and path.exists():
        return
    durable_io.make_dir(path.parent)
    temporary = path.with_name(f"{path.name}.tmp")
    durable_io.unlink(temporary)
    with DurableFile(temporary) as file:
        while chunk:
            file.write(chunk)
            chunk = _read(stream, name)
        file.fsync()
    durable_io.replace(temporary, path)


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(CHUNK_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error


def _temporary_dir() -> Path:
    path = tempfile.mkdtemp(prefix="cbatch-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
