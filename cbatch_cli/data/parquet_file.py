"""One Parquet file of the output, from its temporary name to its final one."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.data.json_text import dump_json
from cbatch_cli.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

METADATA_KEY = "cbatch.run"
ZSTD_LEVEL = 3
WRITE_BYTES = 2**20


class _GatheredWrites(io.RawIOBase):
    """Joins a Parquet writer's many small writes; `drain` hands over what is left."""

    def __init__(self, file: DurableFile) -> None:
        self._file = file
        self._pending = bytearray()

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data)
        self._pending += view
        if len(self._pending) >= WRITE_BYTES:
            self.drain()
        return view.nbytes

    def drain(self) -> None:
        if self._pending:
            self._file.write(self._pending)
            self._pending = bytearray()

    def tell(self) -> int:
        return self._file.tell() + len(self._pending)

    def writable(self) -> bool:
        return True


class NewParquetFile:
    """A Parquet file that nobody sees before it is whole: written as `temporary`, then published.

    Used with `with`; leaving the block without `publish` removes the file. Raises `OutputError`.
    """

    def __init__(self, temporary: Path, schema: pa.Schema) -> None:
        self._temporary = temporary
        self._file = DurableFile(temporary)
        self._gathered = _GatheredWrites(self._file)
        self._is_published = False
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._gathered, mode="w"),
            schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            write_page_checksum=True,
        )

    def write(self, row_group: pa.Table) -> None:
        """Append one row group."""
        self._writer.write_table(row_group, row_group_size=max(row_group.num_rows, 1))

    def publish(self, path: Path, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Finish the file and rename it to `path`, where it is whole and survives power loss.

        `metadata` goes to the file's key-value metadata, each value as JSON.
        """
        self._writer.add_key_value_metadata(
            {key: dump_json(value).decode() for key, value in metadata.items()}
        )
        self._writer.close()
        self._gathered.drain()
        self._file.fsync()
        self._file.close()
        durable_io.replace(self._temporary, path)
        self._is_published = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_published:
            return
        # The writer must not add a footer to a file that is being thrown away.
        self._writer.is_open = False
        self._file.close()
        # What stopped the file matters more than a leftover, which the next run removes.
        with suppress(OutputError):
            durable_io.unlink(self._temporary)


def read_note(path: Path, key: str) -> dict[str, Any]:
    """A value of a file's key-value metadata; empty if it is none of ours, or is not there."""
    try:
        notes = pq.read_metadata(path).metadata or {}
        note = orjson.loads(notes[key.encode()])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def read_row_groups(paths: Sequence[Path]) -> Iterator[pa.Table]:
    """The row groups of Parquet files, one at a time, checksums checked. Raises `OutputError`."""
    for path in paths:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for index in range(file.num_row_groups):
                    yield file.read_row_group(index)
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {path}: {error}") from error
