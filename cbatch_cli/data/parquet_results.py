"""Reading back what an output says of its rows, to write them again without running them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data.row import RowResult
from cbatch_cli.errors import OutputError, RowError, RowErrorType
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason


class ParquetResults:
    """The results in an output file, row by row; best asked for in order.

    Ours are the last columns, of which there is one more `with_token_ids`. Raises `OutputError`.
    """

    def __init__(self, path: Path, *, with_token_ids: bool) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {path}: {error}") from error
        self._names = own_names(self._file, with_token_ids=with_token_ids)
        self._groups = self._rows_of_groups()
        self._group_rows = range(0)
        self._group: list[Sequence[Any]] = []

    def __contains__(self, row_index: int) -> bool:
        """Whether the file holds a row."""
        return self._group_of(row_index) is not None

    def result(self, row_index: int) -> RowResult | None:
        """The result of a row; None if the file does not hold it."""
        if row_index not in self._group_rows:
            number = self._group_of(row_index)
            if number is None:
                return None
            self._group = self._read(number)
            self._group_rows = self._groups[number]
        return decode_result(self._group[row_index - self._group_rows.start])

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _group_of(self, row_index: int) -> int | None:
        number = bisect_right(self._groups, row_index, key=lambda rows: rows.start) - 1
        return number if number >= 0 and row_index in self._groups[number] else None

    def _rows_of_groups(self) -> list[range]:
        """The rows of each row group, which are neighbours; those of all need not be."""
        metadata = self._file.metadata
        leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
        row_index = leaves.index(self._names[0])
        groups = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            statistics = group.column(row_index).statistics
            first = None if statistics is None else statistics.min
            if first is None:
                raise OutputError(f"cannot read back {self._path}: it does not say which rows")
            groups.append(range(first, first + group.num_rows))
        return groups

    def _read(self, row_group: int) -> list[Sequence[Any]]:
        try:
            table = self._file.read_row_group(row_group, columns=self._names)
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {self._path}: {error}") from error
        columns = [table.column(name).to_pylist() for name in self._names]
        return list(zip(*columns, strict=True))


def own_names(file: pq.ParquetFile, *, with_token_ids: bool) -> list[str]:
    """The names that our columns have in a file, prefixes included, in the order of the README."""
    names: list[str] = file.schema_arrow.names
    return names[-6:] if with_token_ids else names[-5:]


def decode_result(values: Sequence[Any]) -> RowResult:
    """The result that our columns hold for a row, given in their order."""
    row_index, completion, finish_reason, error, metrics, *rest = values
    token_ids = rest[0] if rest else None
    return RowResult(
        row_index=row_index,
        completion=completion,
        finish_reason=FinishReason(finish_reason),
        error=error and RowError(RowErrorType(error["type"]), error["message"]),
        metrics=RequestMetrics(**metrics),
        token_ids=None if token_ids is None else tuple(token_ids),
    )
