"""What JSONL and CSV have in common: files of records, read one by one."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.row import InputPosition, Row
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
        self,
        files: Sequence[InputFile],
        read_records: RecordReader,
        *,
        limit: int | None,
        has_header: bool,
    ) -> None:
        self._files = files
        self._read_records = read_records
        self._limit = limit
        self._has_header = has_header
        """Where files have one, reading cannot start in their middle."""
        self._progress = ReadProgress(files)
        self._num_rows = 0

    @property
    def fraction_read(self) -> float:
        """Share of the input read, 0 to 1; may be asked from another thread."""
        of_limit = self._num_rows / self._limit if self._limit else 0.0
        return max(of_limit, self._progress.fraction)

    def rows(
        self,
        columns: Collection[str] | None,
        *,
        num_skipped: int = 0,
        start: InputPosition | None = None,
    ) -> Iterator[Row]:
        """Rows with the named columns, None for all, behind `start` if given.

        The first of them has the index `num_skipped`. Raises `UsageError` for a corrupt file.
        """
        first_file = start.file if start else 0
        self._progress.restart(first_file)
        self._num_rows = num_skipped
        if self._num_rows == self._limit:
            return
        for number, file in enumerate(self._files[first_file:], start=first_file):
            with self._progress.open(file) as stream:
                can_seek = stream.seekable() and not self._has_header
                if start and number == start.file:
                    stream.seek(start.offset)
                for record in self._read_records(stream, file):
                    values = record.columns
                    if columns is not None:
                        values = {name: values[name] for name in values if name in columns}
                    end = InputPosition(number, stream.tell()) if can_seek else None
                    row = Row(
                        self._num_rows,
                        values,
                        record.error,
                        record.content_hash,
                        file.name,
                        end=end,
                    )
                    self._num_rows += 1
                    yield row
                    if self._num_rows == self._limit:
                        return
