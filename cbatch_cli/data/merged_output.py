"""Writing the outputs of shards as one, in the order of the rows, all of them checked again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data import durable_io
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.parquet_file import METADATA_KEY, NewParquetFile, read_note
from cbatch_cli.data.part_info import PART_KEY
from cbatch_cli.errors import OutputError, UsageError

STAGING_NAME = "merged"
MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group of a shard's file, which holds neighbouring rows."""

    path: Path
    number: int
    rows: range


class ShardRows:
    """The rows of all shards, read a row group at a time.

    `index_position` is that of the column `row_index`, from the end. Raises `UsageError` unless
    the files hold rows 0 to `num_rows`, each of them once, and have the same columns;
    `OutputError` if one cannot be read.
    """

    def __init__(self, paths: Sequence[Path], *, index_position: int, num_rows: int) -> None:
        self._open = lru_cache(MAX_OPEN_FILES)(_open)
        self.schema: pa.Schema = self._open(paths[0]).schema_arrow.remove_metadata()
        """Of the joined output: no note on the run of one shard is in it."""
        self._index_name = self.schema.names[index_position]
        groups = [group for path in paths for group in self._groups_of(path)]
        self._groups = sorted(groups, key=lambda group: (group.rows.start, group.rows.stop))
        self._of_path: dict[Path, list[_RowGroup]] = {}
        expected = 0
        for group in self._groups:
            if group.rows.start != expected:
                what = "twice" if group.rows.start < expected else "nowhere"
                row = min(group.rows.start, expected)
                raise UsageError(f"row {row} is {what} in the shards; {group.path} does not fit")
            expected = group.rows.stop
            self._of_path.setdefault(group.path, []).append(group)
        if expected != num_rows:
            raise UsageError(f"the shards hold {expected} rows, the input has {num_rows}")

    def tables(self, path: Path | None = None) -> Iterator[pa.Table]:
        """The rows in order, of one file or of all."""
        for group in self._groups if path is None else self._of_path.get(path, ()):
            yield self._read(group)

    def paths(self) -> list[Path]:
        """The files that hold rows, in the order of their first rows."""
        return list(self._of_path)

    def _groups_of(self, path: Path) -> Iterator[_RowGroup]:
        file = self._open(path)
        if not file.schema_arrow.remove_metadata().equals(self.schema, check_metadata=True):
            raise UsageError(f"{path} has other columns than the shards before it")
        metadata = file.metadata
        leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
        position = leaves.index(self._index_name)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            statistics = group.column(position).statistics
            if statistics is None or statistics.min is None:
                raise OutputError(f"cannot read back {path}: it does not say which rows")
            yield _RowGroup(path, number, range(statistics.min, statistics.min + group.num_rows))

    def _read(self, group: _RowGroup) -> pa.Table:
        try:
            table = self._open(group.path).read_row_group(group.number)
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {group.path}: {error}") from error
        indices = table.column(self._index_name).to_numpy()
        if not np.array_equal(indices, np.arange(group.rows.start, group.rows.stop)):
            raise OutputError(f"{group.path} does not hold the rows that it says")
        return table.replace_schema_metadata(None)


def write_merged(
    target: OutputTarget,
    rows: ShardRows,
    *,
    parts: Sequence[Path],
    metadata: Mapping[str, Any],
    totals: Mapping[str, Any],
) -> None:
    """Make `target`, in place of what is there, hold the rows; they appear at once.

    A folder gets the files `parts` of the shards' folders again, under their names. `totals` is
    for the metadata of the file, or of the last part. Raises `OutputError`.
    """
    if not target.is_directory:
        temporary = target.work_path(target.path.name + ".tmp")
        notes = {METADATA_KEY: {**metadata, **totals}}
        _write(temporary, target.path, rows.schema, rows.tables(), notes)
        return
    staging = target.work_path(STAGING_NAME)
    discard_staging(target)
    durable_io.make_dir(staging)
    for path in parts:
        told = {**metadata, **(totals if path == parts[-1] else {})}
        notes = {METADATA_KEY: told, PART_KEY: read_note(path, PART_KEY)}
        temporary = target.work_path(path.name + ".tmp")
        _write(temporary, staging / path.name, rows.schema, rows.tables(path), notes)
    target.clear()
    durable_io.replace(staging, target.path)


def discard_staging(target: OutputTarget) -> None:
    """Remove what a merge that died has left of a folder."""
    staging = target.work_path(STAGING_NAME)
    if staging.is_dir():
        for name in durable_io.list_dir(staging):
            durable_io.unlink(staging / name)
        durable_io.remove_empty_dir(staging)


def _write(
    temporary: Path,
    path: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    notes: Mapping[str, Mapping[str, Any]],
) -> None:
    with NewParquetFile(temporary, schema) as file:
        for table in tables:
            file.write(table)
        file.publish(path, notes)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot read back {path}: {error}") from error
