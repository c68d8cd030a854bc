"""Finished rows in, Parquet out: parts of a fixed range of input rows, each in input order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbatch_cli.data import durable_io
from cbatch_cli.data.output_schema import FinishedRow, RowEncoder, to_record_batch
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.parquet_file import METADATA_KEY, NewParquetFile, read_row_groups
from cbatch_cli.data.part_buffer import PartBuffer
from cbatch_cli.data.part_info import PART_KEY, PartInfo
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import CBatchError, OutputError
from cbatch_cli.shard import WHOLE, Shard

MAX_RAW_BYTES = 8 * 2**20
"""Python objects of all open parts together; beyond it they become Arrow batches."""
MAX_ARROW_BYTES = 16 * 2**20
"""Arrow batches of all open parts together; beyond it the largest part goes to disk."""

NO_PARTS: Mapping[int, PartInfo] = {}


def _ignore_part(rows: range) -> None:
    """Nobody waits for parts."""


class ParquetSink:
    """Writes finished rows, arriving in any order, to the target. Used from one thread.

    A part covers `rows_per_part` input rows and is written, synced and renamed when the last of
    them is done; `on_part_durable` is then called with its range of row indices. Parts of a
    folder appear in it at once; those of a single file stay in the work directory until `finish`
    joins them, row group by row group, into the file, which appears by one rename.

    With a `shard`, parts are those of its blocks of rows, and the others belong to nobody here.

    `durable` are the parts that earlier runs of the job have left, whose rows must not be added.

    `metadata` is what is known of the run at its start: it goes into each part of a folder.
    `finish` is given all of it, totals included: that goes into the single file, or into the
    last part of a folder. Raises `OutputError`; after one only `abort` may be called.
    """

    def __init__(
        self,
        *,
        target: OutputTarget,
        schema: pa.Schema,
        encoder: RowEncoder,
        rows_per_part: int,
        shard: Shard = WHOLE,
        metadata: Mapping[str, Any],
        durable: Mapping[int, PartInfo] = NO_PARTS,
        on_part_durable: Callable[[range], None] = _ignore_part,
    ) -> None:
        self._target = target
        self._schema = schema
        self._encode = partial(to_record_batch, schema=schema, encoder=encoder)
        self._rows_per_part = rows_per_part
        self._shard = shard
        self._metadata = metadata
        self._on_part_durable = on_part_durable
        self._open: dict[int, PartBuffer] = {}
        self._durable = dict(durable)
        """The parts that have been renamed, by number."""
        self._raw_bytes = 0

    def add(self, row: Row, result: RowResult) -> None:
        """Take one finished row. Raises `ValueError` for a row that is here already."""
        number = result.row_index // self._rows_per_part
        if number in self._durable:
            raise ValueError(f"row {result.row_index} is finished twice")
        part = self._open.get(number)
        if part is None:
            part = self._open[number] = self._new_part(number)
        raw_bytes = part.raw_bytes
        part.add(FinishedRow(row, result))
        self._raw_bytes += part.raw_bytes - raw_bytes
        if part.is_complete:
            self._write_part(number, self._metadata)
        elif self._raw_bytes > MAX_RAW_BYTES:
            self._free_memory()

    def finish(self, metadata: Mapping[str, Any]) -> Path:
        """Write what is left and make the target whole; returns its path.

        Raises `CBatchError` if a row is missing: rows in must equal rows out.
        """
        last = max(self._open.keys() | self._durable.keys(), default=self._shard.index)
        self._check_no_row_is_missing(last)
        if last not in self._durable:
            self._open.setdefault(last, self._new_part(last))
            self._write_part(last, metadata)
        elif self._target.is_directory:
            # The last part was full before the totals were known.
            path = self._target.part_path(last)
            self._write_file(path, read_row_groups([path]), metadata, self._durable[last])
        if not self._target.is_directory:
            self._join(self._shard.blocks(last), metadata)
        return self._target.path

    def abort(self) -> None:
        """Let go of rows that are in no part yet; the parts that exist are kept."""
        for part in self._open.values():
            with suppress(OutputError):
                part.discard()
        self._open.clear()

    def _new_part(self, number: int) -> PartBuffer:
        first_row = number * self._rows_per_part
        return PartBuffer(
            rows=range(first_row, first_row + self._rows_per_part),
            encode=self._encode,
            scratch=self._target.work_path(f"{self._target.part_path(number).name}.scratch.tmp"),
        )

    def _check_no_row_is_missing(self, last: int) -> None:
        for number in self._shard.blocks(last):
            if number in self._durable:
                continue
            part = self._open.get(number) or self._new_part(number)
            if part.has_gap or number < last:
                raise CBatchError(
                    f"rows of the part {part.rows.start} to {part.rows.stop - 1} never finished"
                )

    def _write_part(self, number: int, metadata: Mapping[str, Any]) -> None:
        part = self._open[number]
        raw_bytes = part.raw_bytes
        info = part.info
        self._write_file(self._target.part_path(number), part.row_groups(), metadata, info)
        del self._open[number]
        self._raw_bytes -= raw_bytes
        self._durable[number] = info
        part.discard()
        self._on_part_durable(info.rows)

    def _write_file(
        self,
        path: Path,
        row_groups: Iterable[pa.Table],
        metadata: Mapping[str, Any],
        part: PartInfo | None = None,
    ) -> None:
        temporary = self._target.work_path(path.name + ".tmp")
        with NewParquetFile(temporary, self._schema) as file:
            for row_group in row_groups:
                file.write(row_group)
            parts = {} if part is None else {PART_KEY: part.to_dict()}
            file.publish(path, {METADATA_KEY: metadata, **parts})

    def _join(self, numbers: range, metadata: Mapping[str, Any]) -> None:
        parts = [self._target.part_path(number) for number in numbers]
        self._write_file(self._target.path, read_row_groups(parts), metadata)
        for part in parts:
            durable_io.unlink(part)

    def _free_memory(self) -> None:
        # All of them: even one old row may keep a whole batch of its input in memory.
        for part in self._open.values():
            part.compact()
        self._raw_bytes = 0
        while sum(part.arrow_bytes for part in self._open.values()) > MAX_ARROW_BYTES:
            max(self._open.values(), key=lambda part: part.arrow_bytes).spill()
