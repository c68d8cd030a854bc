"""What JSONL and CSV have in common: files of records, read one by one."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.row import Row
from cbatch_cli.data.streams import ReadProgress
from cbatch_cli.errors import RowError


class Record(NamedTuple):
    """One record of a file, or the reason why it cannot be read."""

    columns: dict[str, Any]
    error: RowError | None
    content_hash: bytes
    num_bytes: int


class RecordReader(Protocol):
    """Reads the records of one open file."""

    def __call__(self, stream: io.BufferedReader, file: InputFile) -> Iterator[Record]:
        """Records in order, in constant memory."""
        ...


class RecordFiles:
    """Rows of several files, numbered through; stops after `limit` rows."""

    def __init__(
        self, files: Sequence[InputFile], read_records: RecordReader, *, limit: int | None
    ) -> None:
        self._files = files
        self._read_records = read_records
        self._limit = limit
        self._progress = ReadProgress(files)
        self._num_rows = 0

    @property
    def fraction_read(self) -> float:
        """Share of the input read, 0 to 1; may be asked from another thread."""
        of_limit = self._num_rows / self._limit if self._limit else 0.0
        return max(of_limit, self._progress.fraction)

    def rows(self, columns: Collection[str] | None) -> Iterator[Row]:
        """Rows with the named columns, None for all. Raises `UsageError` for a corrupt file."""
        self._progress.restart()
        self._num_rows = 0
        for file in self._files:
            with self._progress.open(file) as stream:
                for record in self._read_records(stream, file):
                    values = record.columns
                    if columns is not None:
                        values = {name: values[name] for name in values if name in columns}
                    row = Row(self._num_rows, values, record.error, record.content_hash, file.name)
                    self._num_rows += 1
                    yield row
                    if self._num_rows == self._limit:
                        return
