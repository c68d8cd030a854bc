"""From what the user named to the files to read, in natural order."""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch_cli.data.json_text import valid_unicode
from cbatch_cli.data.remote_files import is_url, list_urls, open_url, url_path, url_size
from cbatch_cli.data.spool import spool_pipe, spool_stdin
from cbatch_cli.errors import UsageError

STDIN = "-"

FileFormat = Literal["jsonl", "csv", "parquet"]

FORMAT_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSION_SUFFIXES = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read. `name` is what the user knows it by, `location` a path or URL."""

    name: str
    location: str

    @property
    def is_remote(self) -> bool:
        """Whether fsspec must open it."""
        return is_url(self.location)

    @property
    def suffixes(self) -> tuple[str, str]:
        """The suffix of the format and that of the compression, lower case; empty if unknown."""
        stem, suffix = os.path.splitext(url_path(self.name).lower())
        if suffix in COMPRESSION_SUFFIXES:
            return os.path.splitext(stem)[1], suffix
        return suffix, ""

    def open(self) -> io.RawIOBase | io.BufferedReader:
        """The raw bytes. Raises `OSError`."""
        if self.is_remote:
            return open_url(self.location)
        return open(self.location, "rb", buffering=0)

    def size(self) -> int | None:
        """Length in bytes; None where a remote file system cannot tell. Raises `OSError`."""
        return url_size(self.location) if self.is_remote else os.stat(self.location).st_size

    def modified_ns(self) -> int:
        """When a local file was last written, in nanoseconds. Raises `OSError`."""
        return os.stat(self.location).st_mtime_ns


def expand_inputs(inputs: Sequence[str], *, spool_dir: Path | None) -> tuple[InputFile, ...]:
    """All files that `inputs` name, in natural order: part-2 before part-10.

    A folder stands for the files under it whose suffix says that they hold rows; names that start
    with a dot or an underscore are passed over. `-` and named pipes are copied to `spool_dir`
    first, so that they can be read again. Raises `UsageError` for what is not there.
    """
    if STDIN in inputs:
        if len(inputs) > 1:
            raise UsageError("stdin (-) cannot be combined with other inputs")
        return (InputFile("stdin", str(spool_stdin(spool_dir))),)
    files: list[InputFile] = []
    for number, name in enumerate(inputs):
        if is_url(name):
            files.extend(_expand_url(name))
        elif os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
            files.append(InputFile(name, str(spool_pipe(Path(name), number, spool_dir))))
        else:
            files.extend(_local_file(path) for path in _expand_path(name))
    return tuple(sorted(files, key=lambda file: natural_key(file.name)))


def natural_key(name: str) -> tuple[Any, ...]:
    """A sort key under which numbers inside of names count as numbers."""
    # Texts and numbers take turns, so like is compared with like.
    parts = _DIGITS.split(name.casefold())
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def _local_file(path: str) -> InputFile:
    return InputFile(valid_unicode(path), path)


def _expand_path(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        paths = [path for path in _walk(name) if _holds_rows(os.path.relpath(path, name))]
        return _require(paths, f"the folder {name} holds no file of rows")
    if not glob.has_magic(name):
        raise UsageError(f"the input {name} does not exist")
    paths = [path for path in glob.glob(name, recursive=True) if os.path.isfile(path)]
    return _require(paths, f"no file matches {name}")


def _expand_url(url: str) -> list[InputFile]:
    try:
        urls, folder = list_urls(url)
    except OSError as error:
        raise UsageError(f"cannot open {url}: {error}") from error
    if folder is not None:
        urls = [found for found in urls if _holds_rows(found.removeprefix(folder))]
    return [InputFile(found, found) for found in _require(urls, f"no file of rows at {url}")]


def _walk(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"cannot list {error.filename}: {error.strerror}") from error

    return [
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, onerror=refuse)
        for name in names
    ]


def _holds_rows(relative_path: str) -> bool:
    """Whether a file found in a folder is data: the name has a known suffix and is not hidden."""
    parts = relative_path.split("/")
    if any(part.startswith((".", "_")) or part.endswith(".cbatch") for part in parts):
        return False
    return InputFile(relative_path, relative_path).suffixes[0] in FORMAT_SUFFIXES


def _require(found: list[str], message: str) -> list[str]:
    if not found:
        raise UsageError(message)
    return found
