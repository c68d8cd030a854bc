"""CSV and TSV with a header; every value is a string."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from cbatch_cli.data.fields import select_columns, source_file_field
from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.jsonl_source import BYTE_ORDER_MARK
from cbatch_cli.data.lines import OverlongLine, content_hash, read_lines
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.records import Record, RecordFiles
from cbatch_cli.data.row import InputPosition, Row
from cbatch_cli.data.streams import open_stream
from cbatch_cli.errors import RowError, RowErrorType, UsageError


class CsvSource:
    """Rows of CSV or TSV files. Opening reads the header of each.

    Columns are those of all headers; a file without one of them has nulls there. Raises
    `UsageError` for a file that cannot be read, a header that is absent or has a name twice, or a
    selected column that is not there.
    """

    is_openai = False
    is_indexed = False
    num_rows: int | None = None

    def __init__(
        self, files: Sequence[InputFile], *, columns: str, limit: int | None, max_line_bytes: int
    ) -> None:
        # The module refuses a field above a limit of its own, which is one for the whole process.
        csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))
        names: dict[str, None] = {}
        for file in files:
            with open_stream(file) as (stream, _):
                names.update(dict.fromkeys(_CsvReader(stream, file, max_line_bytes).header))
        self.column_names = tuple(names)
        self._selected = select_columns(columns, self.column_names)
        self._has_several_files = len(files) > 1
        read_records = partial(read_csv, max_line_bytes=max_line_bytes)
        self.files = tuple(files)
        self._records = RecordFiles(files, read_records, limit=limit, has_header=True)

    @property
    def fraction_read(self) -> float:
        """Share of the input read, 0 to 1; may be asked from another thread."""
        return self._records.fraction_read

    def arrow_schema(self, prompt: PromptColumns) -> pa.Schema:
        """The columns passed through, all strings, whatever the prompt."""
        fields = [pa.field(name, pa.string()) for name in self._selected]
        if self._has_several_files:
            fields.append(source_file_field(self._selected))
        return pa.schema(fields)

    def rows(
        self, prompt: PromptColumns, *, num_skipped: int = 0, start: InputPosition | None = None
    ) -> Iterator[Row]:
        """All rows behind those skipped, those that cannot be read among them."""
        if prompt.columns_read is None:
            return self._records.rows(None, num_skipped=num_skipped, start=start)
        columns = prompt.columns_read.union(self._selected)
        return self._records.rows(columns, num_skipped=num_skipped, start=start)


def read_csv(
    stream: io.BufferedReader, file: InputFile, *, max_line_bytes: int
) -> Iterator[Record]:
    """Each record after the header; blank lines are passed over.

    A record that is malformed, is not UTF-8, exceeds `max_line_bytes` or has not as many fields as
    the header is one with the error `invalid_json`, the type for input that cannot be read.
    Reading goes on with the line after it.
    """
    reader = _CsvReader(stream, file, max_line_bytes)
    while (record := reader.next_record()) is not None:
        yield record


class _CsvReader:
    """The records of one file; the lines that each is made of are known."""

    def __init__(self, stream: io.BufferedReader, file: InputFile, max_bytes: int) -> None:
        self._lines = _RecordLines(stream, max_bytes)
        self._reader = csv.reader(self._lines, delimiter=_delimiter(stream, file), strict=True)
        self.header = self._read_header(file)

    def next_record(self) -> Record | None:
        """The next record; None at the end of the file."""
        while (fields := self._next_fields()) is not None:
            data = b"".join(self._lines.data)
            columns: dict[str, Any] = {}
            error = fields if isinstance(fields, RowError) else None
            if isinstance(fields, list):
                if not fields:
                    continue
                if len(fields) == len(self.header):
                    columns = dict(zip(self.header, fields, strict=True))
                else:
                    error = _unreadable(
                        f"the record has {len(fields)} fields, the header has {len(self.header)}"
                    )
            return Record(columns, error, content_hash(data.rstrip(b"\r\n")), len(data))
        return None

    def _read_header(self, file: InputFile) -> tuple[str, ...]:
        fields: list[str] | RowError | None = []
        while fields == []:
            fields = self._next_fields()
        if fields is None:
            raise UsageError(f"{file.name} is empty; a CSV file starts with a header")
        if isinstance(fields, RowError):
            raise UsageError(f"cannot read the header of {file.name}: {fields.message}")
        repeated = [name for name in dict.fromkeys(fields) if fields.count(name) > 1]
        if repeated:
            raise UsageError(f"{file.name} has more than one column {repeated[0]!r}")
        return tuple(fields)

    def _next_fields(self) -> list[str] | RowError | None:
        self._lines.start_record()
        try:
            fields = next(self._reader)
        except StopIteration:
            return None
        except _OverlongRecord:
            return _unreadable(
                f"the record is longer than {self._lines.max_bytes} bytes; is a quote unclosed?"
            )
        except csv.Error as error:
            # What follows a dash is advice to whoever calls the module.
            return _unreadable(f"malformed record: {str(error).partition(' - ')[0]}")
        return fields if self._lines.is_utf8 else _unreadable("not UTF-8")


class _OverlongRecord(Exception):
    """The lines that belong to one record exceed the limit."""


class _RecordLines:
    """Feeds the reader with lines and keeps those that it took for the current record."""

    def __init__(self, stream: io.BufferedReader, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.data: list[bytes] = []
        self.is_utf8 = True
        self._num_bytes = 0
        self._is_first = True
        self._lines = read_lines(stream, max_bytes)

    def start_record(self) -> None:
        self.data = []
        self.is_utf8 = True
        self._num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if isinstance(line, OverlongLine):
            # Its hash stands for the bytes, which are gone.
            self.data.append(line.content_hash)
            raise _OverlongRecord
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        self.data.append(line)
        self._num_bytes += len(line)
        if self._num_bytes > self.max_bytes + 2:
            raise _OverlongRecord
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            # The reader still has to see the quotes, or it would lose the end of the record.
            self.is_utf8 = False
            return line.decode("utf-8", "replace")


def _unreadable(message: str) -> RowError:
    return RowError(RowErrorType.INVALID_JSON, message)


def _delimiter(stream: io.BufferedReader, file: InputFile) -> str:
    """A tab for a TSV suffix, and where the first line has tabs but no comma."""
    first_line = stream.peek(1).split(b"\n", 1)[0]
    is_tsv = file.suffixes[0] in (".tsv", ".tab")
    return "\t" if is_tsv or (b"\t" in first_line and b"," not in first_line) else ","
