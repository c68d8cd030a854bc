"""The finished rows of one part until the part is complete, held in as little memory as needed.

Rows finish in any order, and one slow row keeps its part open while later parts fill up. So a row
goes through three forms, each smaller in memory than the one before: Python objects, Arrow
batches, and compressed batches in a scratch file. Reading back gathers one row group at a time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.data.output_schema import BatchEncoder, FinishedRow
from cbatch_cli.data.part_info import PartInfo, RowsHash
from cbatch_cli.data.row import Row
from cbatch_cli.errors import OutputError

ROW_GROUP_ROWS = 4096
ROW_GROUP_BYTES = 64 * 2**20

ROW_OVERHEAD_BYTES = 1536
"""About what a finished row weighs in Python objects beside its text: metrics, dicts, headers."""
MAX_ROW_BYTES = 2**32 - 1


@dataclass(kw_only=True, slots=True)
class _Chunk:
    """Rows in Arrow form, sorted by row index; `table` is None once they are in the scratch."""

    row_indices: np.ndarray[Any, np.dtype[np.int64]]
    table: pa.Table | None
    offset: int = 0
    length: int = 0


class PartBuffer:
    """Finished rows whose indices lie in `rows`; `scratch` is where they go under `spill`.

    `encode` gives a batch of the output's schema. Raises `OutputError` when the scratch fails.
    """

    def __init__(self, *, rows: range, encode: BatchEncoder, scratch: Path) -> None:
        self.rows = rows
        self.raw_bytes = 0
        """Estimated size of the rows still held as Python objects."""
        self.arrow_bytes = 0
        """Size of the rows held as Arrow batches."""
        self.num_rows = 0
        self._encode = encode
        self._scratch = scratch
        self._scratch_file: DurableFile | None = None
        self._raw: list[FinishedRow] = []
        self._chunks: list[_Chunk] = []
        # Estimated bytes of each row of the range seen so far, 0 for one that is not there.
        self._sizes = array("I")
        self._hashes: dict[int, bytes] = {}
        self._last: Row | None = None
        self._errors: Counter[str] = Counter()

    def add(self, finished: FinishedRow) -> None:
        """Take one row. Raises `ValueError` if the row is here already."""
        offset = self.rows.index(finished.result.row_index)
        if offset >= len(self._sizes):
            self._sizes.frombytes(bytes(self._sizes.itemsize * (offset + 1 - len(self._sizes))))
        if self._sizes[offset]:
            raise ValueError(f"row {finished.result.row_index} is finished twice")
        size = min(_estimate_bytes(finished), MAX_ROW_BYTES)
        self._sizes[offset] = size
        self._hashes[offset] = finished.row.content_hash
        if self._last is None or finished.row.index > self._last.index:
            self._last = Row(finished.row.index, end=finished.row.end)
        if finished.result.error is not None:
            self._errors[finished.result.error.type.value] += 1
        self._raw.append(finished)
        self.raw_bytes += size
        self.num_rows += 1

    @property
    def info(self) -> PartInfo:
        """What the part will say of itself, once no row is missing."""
        rows_hash = RowsHash()
        for offset in range(self.num_rows):
            rows_hash.add(self._hashes[offset])
        return PartInfo(
            rows=range(self.rows.start, self.rows.start + self.num_rows),
            rows_hash=rows_hash.hexdigest(),
            end=None if self._last is None else self._last.end,
            errors=self._errors,
        )

    @property
    def is_complete(self) -> bool:
        """Whether every row of the range is here."""
        return self.num_rows == len(self.rows)

    @property
    def has_gap(self) -> bool:
        """Whether a row is missing before the last one that is here."""
        return self.num_rows != len(self._sizes)

    def compact(self) -> None:
        """Turn rows held as Python objects into an Arrow batch."""
        if not self._raw:
            return
        self._raw.sort(key=lambda finished: finished.result.row_index)
        table = pa.Table.from_batches([self._encode(self._raw)])
        indices = [finished.result.row_index for finished in self._raw]
        self._chunks.append(_Chunk(row_indices=np.array(indices, np.int64), table=table))
        self.arrow_bytes += table.nbytes
        self._raw = []
        self.raw_bytes = 0

    def spill(self) -> None:
        """Move Arrow batches to the scratch file."""
        if self._scratch_file is None:
            self._scratch_file = DurableFile(self._scratch)
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        for chunk in self._chunks:
            if chunk.table is None:
                continue
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, chunk.table.schema, options=options) as writer:
                writer.write_table(chunk.table)
            chunk.offset = self._scratch_file.tell()
            chunk.length = self._scratch_file.write(sink.getvalue())
            chunk.table = None
        self.arrow_bytes = 0

    def row_groups(self) -> Iterator[pa.Table]:
        """The rows in input order, as tables of at most a row group's rows and about its bytes."""
        self.compact()
        first_row = self.rows.start
        for start, stop in _row_group_bounds(self._sizes):
            yield self._gather(first_row + start, first_row + stop)

    def discard(self) -> None:
        """Remove the scratch file."""
        if self._scratch_file is not None:
            self._scratch_file.close()
            self._scratch_file = None
            durable_io.unlink(self._scratch)

    def _gather(self, start: int, stop: int) -> pa.Table:
        pieces = []
        indices = []
        for chunk in self._chunks:
            low, high = np.searchsorted(chunk.row_indices, (start, stop))
            if low == high:
                continue
            if chunk.table is not None:
                pieces.append(chunk.table.slice(low, high - low))
            else:
                # Copied out, so that only one chunk of the scratch is in memory at a time.
                pieces.append(self._read(chunk).take(np.arange(low, high)))
            indices.append(chunk.row_indices[low:high])
        table = pa.concat_tables(pieces)
        return table.take(np.argsort(np.concatenate(indices)))

    def _read(self, chunk: _Chunk) -> pa.Table:
        try:
            with self._scratch.open("rb") as file:
                file.seek(chunk.offset)
                data = file.read(chunk.length)
            return pa.ipc.open_stream(data).read_all()
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {self._scratch}: {error}") from error


def _row_group_bounds(sizes: array[int]) -> Iterator[tuple[int, int]]:
    start = 0
    num_bytes = 0
    for position, size in enumerate(sizes):
        is_full = position - start == ROW_GROUP_ROWS or num_bytes + size > ROW_GROUP_BYTES
        if is_full and position > start:
            yield start, position
            start, num_bytes = position, 0
        num_bytes += size
    if start < len(sizes):
        yield start, len(sizes)


def _estimate_bytes(finished: FinishedRow) -> int:
    result = finished.result
    num_bytes = ROW_OVERHEAD_BYTES + _value_bytes(result.completion)
    num_bytes += 4 * len(result.token_ids or ())
    if finished.row.arrow is not None:
        num_bytes += finished.row.arrow.num_bytes
    return num_bytes + _value_bytes(finished.row.columns)


def _value_bytes(value: Any) -> int:
    """Roughly what a value of a row takes in Arrow form; text dominates."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(8 + _value_bytes(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return sum(8 + _value_bytes(entry) for entry in value)
    return 8
