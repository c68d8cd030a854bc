"""Reading back what an output says of its rows, to write them again without running them."""

from __future__ import annotations

from collections.abc import Mapping
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
        names = self._file.schema_arrow.names
        self._names = names[-6:] if with_token_ids else names[-5:]
        first = self._read(0)[0]["row_index"] if self._file.metadata.num_rows else 0
        self.rows = range(first, first + self._file.metadata.num_rows)
        """Indices of the rows in the file."""
        self._group_rows = range(0)
        self._group: list[dict[str, Any]] = []

    def result(self, row_index: int) -> RowResult | None:
        """The result of a row; None if the file does not hold it."""
        if row_index not in self.rows:
            return None
        if row_index not in self._group_rows:
            self._load_group_of(row_index)
        return _decode(self._group[row_index - self._group_rows.start])

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _load_group_of(self, row_index: int) -> None:
        start = self.rows.start
        for number in range(self._file.num_row_groups):
            stop = start + self._file.metadata.row_group(number).num_rows
            if row_index < stop:
                self._group = self._read(number)
                self._group_rows = range(start, stop)
                return
            start = stop

    def _read(self, row_group: int) -> list[dict[str, Any]]:
        """Rows under our names, whatever prefix they have in the file."""
        try:
            table = self._file.read_row_group(row_group, columns=self._names)
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {self._path}: {error}") from error
        ours = ["row_index", "completion", "finish_reason", "error", "metrics", "token_ids"]
        columns = [table.column(name).to_pylist() for name in self._names]
        return [dict(zip(ours, values, strict=False)) for values in zip(*columns, strict=True)]


def _decode(values: Mapping[str, Any]) -> RowResult:
    error, token_ids = values["error"], values.get("token_ids")
    return RowResult(
        row_index=values["row_index"],
        completion=values["completion"],
        finish_reason=FinishReason(values["finish_reason"]),
        error=error and RowError(RowErrorType(error["type"]), error["message"]),
        metrics=RequestMetrics(**values["metrics"]),
        token_ids=None if token_ids is None else tuple(token_ids),
    )
