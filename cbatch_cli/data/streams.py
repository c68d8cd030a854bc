"""Opening an input for reading: decompressed, with the position in the compressed bytes known."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cbatch_cli.data.input_files import COMPRESSION_SUFFIXES, InputFile
from cbatch_cli.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BUFFER_BYTES = 256 * 1024
DECOMPRESSED_BYTES = 16 * 1024
"""Decompressed at a time: what of it comes before a corrupt place is lost with that place."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
ZSTD_SKIPPABLE_FRAMES = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))
_MAGIC_BYTES: dict[bytes | tuple[bytes, ...], str] = {
    b"\x1f\x8b": "gzip",
    (b"\x28\xb5\x2f\xfd", *ZSTD_SKIPPABLE_FRAMES): "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}


class ReadProgress:
    """How much of a run's input files has been read, in bytes as they lie on disk."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._sizes = [_size(file) for file in files]
        self._num_finished = 0
        self._counter: _CountingReader | None = None

    @property
    def fraction(self) -> float:
        """Share read, 0 to 1. Where sizes are not known, the share of files read to their end."""
        if self._num_finished == len(self._sizes):
            return 1.0
        if None in self._sizes:
            return self._num_finished / len(self._sizes)
        sizes = [size or 0 for size in self._sizes]
        counter = self._counter
        position = counter.position if counter else 0
        return min(1.0, (sum(sizes[: self._num_finished]) + position) / max(1, sum(sizes)))

    def restart(self, first_file: int = 0) -> None:
        """Count again, as if the files before `first_file` were read."""
        self._num_finished = first_file
        self._counter = None

    @contextmanager
    def open(self, file: InputFile) -> Iterator[io.BufferedReader]:
        """`open_stream` for the next of the files, counted."""
        with open_stream(file) as (stream, counter):
            self._counter = counter
            yield stream
        self._counter = None
        self._num_finished += 1


@contextmanager
def open_stream(file: InputFile) -> Iterator[tuple[io.BufferedReader, _CountingReader]]:
    """The decompressed bytes of `file`, and what counts the compressed ones.

    The compression is told by the suffix, else by magic bytes. Raises `UsageError` naming the
    file, here or inside of the block, for what cannot be read, is cut short or is corrupt, and
    for UTF-16.
    """
    try:
        with ExitStack() as stack:
            counter = _CountingReader(file.open())
            stream = _buffered(stack, counter)
            compression = _compression(file, stream)
            if compression is not None:
                inner = stack.enter_context(_decompress(stream, compression))
                stream = _buffered(stack, _Decompressed(inner))
            if stream.peek(2).startswith(UTF16_MARKS):
                raise UsageError(f"{file.name} is UTF-16; convert it to UTF-8")
            yield stream, counter
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UsageError(f"cannot read {file.name}: {error}") from error


class _CountingReader(io.RawIOBase):
    """Passes reads on and counts their bytes."""

    def __init__(self, inner: io.RawIOBase | io.BufferedReader) -> None:
        self._inner = inner
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        count = self._inner.readinto(buffer)
        self.position += count or 0
        return count

    def seekable(self) -> bool:
        return self._inner.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.position = self._inner.seek(offset, whence)
        return self.position

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Decompressed(io.RawIOBase):
    """Passes on what a decompressor has at hand, so that it comes before an error further on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        data = self._inner.read1(min(len(view), DECOMPRESSED_BYTES))
        view[: len(data)] = data
        return len(data)


def _buffered(stack: ExitStack, raw: io.RawIOBase) -> io.BufferedReader:
    return stack.enter_context(io.BufferedReader(stack.enter_context(raw), BUFFER_BYTES))


def _compression(file: InputFile, stream: io.BufferedReader) -> str | None:
    suffix = file.suffixes[1]
    if suffix:
        return COMPRESSION_SUFFIXES[suffix]
    head = stream.peek(8)
    return next((name for magic, name in _MAGIC_BYTES.items() if head.startswith(magic)), None)


def _decompress(stream: io.BufferedReader, compression: str) -> Any:
    """A reader of all members or frames, which raises for a last one that is cut short."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=stream)
    if compression == "bzip2":
        return bz2.BZ2File(stream)
    if compression == "xz":
        return lzma.LZMAFile(stream)
    # Other zstd readers for Python take a frame that is cut short for the end of the data.
    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")


def _size(file: InputFile) -> int | None:
    try:
        return file.size()
    except OSError as error:
        raise UsageError(f"cannot read {file.name}: {error}") from error
