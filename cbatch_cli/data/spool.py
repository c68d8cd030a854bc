"""Copies of inputs that can be read only once: stdin and named pipes."""

from __future__ import annotations

import atexit
import filecmp
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.errors import UsageError

CHUNK_BYTES = 2**20
_SPOOL_NAME = re.compile(r"(stdin|pipe-\d+)(?:\.(\d+))?\.spool")


def spool_stdin(spool_dir: Path | None) -> Path:
    """Copy all of stdin to a file that survives the process, and return its path.

    Where stdin gives nothing (a terminal, or end of file at once), or the same again, the copy
    that an earlier run has left is used. Other content goes to a file beside it, since the run
    that it is for may yet be refused. Without `spool_dir` the copy is temporary. Raises
    `UsageError` on a terminal without a copy.
    """
    folder = spool_dir or _temporary_dir()
    if sys.stdin is None or sys.stdin.isatty():
        earlier = _spools(folder, "stdin")
        if earlier:
            return earlier[0]
        raise UsageError("stdin (-) is a terminal: pipe the rows into cbatch")
    return _spool(sys.stdin.buffer, "stdin", folder, "stdin")


def spool_pipe(pipe: Path, number: int, spool_dir: Path | None) -> Path:
    """Copy all that comes through a named pipe, the input `number` of the run, to a file."""
    with pipe.open("rb") as stream:
        return _spool(stream, str(pipe), spool_dir or _temporary_dir(), f"pipe-{number}")


def discard_spools(spool_dir: Path, *, keep: Collection[Path] = ()) -> None:
    """Remove the copies but for those in `keep`."""
    for path in _spools(spool_dir):
        if path not in keep:
            durable_io.unlink(path)


def discard_later_spools(spool_dir: Path) -> None:
    """Of copies of the same input remove all but the first, which the kept run has read."""
    seen: set[str] = set()
    for path in _spools(spool_dir):
        stem = path.name.partition(".")[0]
        if stem in seen:
            durable_io.unlink(path)
        seen.add(stem)


def _spools(folder: Path, stem: str | None = None) -> list[Path]:
    """The copies in a folder, of one input or of all, in the order in which they were made."""
    found: list[tuple[str, int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _SPOOL_NAME.fullmatch(path.name)
        if match is not None and stem in (None, match[1]):
            found.append((match[1], int(match[2] or 1), path))
    return [path for _, _, path in sorted(found)]


def _spool(stream: BinaryIO, name: str, folder: Path, stem: str) -> Path:
    earlier = _spools(folder, stem)
    chunk = _read(stream, name)
    if not chunk and earlier:
        return earlier[0]
    durable_io.make_dir(folder)
    temporary = folder / f"{stem}.spool.tmp"
    durable_io.unlink(temporary)
    with DurableFile(temporary) as file:
        while chunk:
            file.write(chunk)
            chunk = _read(stream, name)
        file.fsync()
    if earlier and filecmp.cmp(temporary, earlier[0], shallow=False):
        durable_io.unlink(temporary)
        return earlier[0]
    path = folder / f"{stem}.spool"
    if earlier:
        number = int(_SPOOL_NAME.fullmatch(earlier[-1].name)[2] or 1)  # type: ignore[index]
        path = folder / f"{stem}.{number + 1}.spool"
    durable_io.replace(temporary, path)
    return path


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(CHUNK_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error


def _temporary_dir() -> Path:
    path = tempfile.mkdtemp(prefix="cbatch-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
