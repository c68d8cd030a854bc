"""JSON Lines: one object a line."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from cbatch_cli.data.column_types import ColumnObserver
from cbatch_cli.data.fields import extra_field, json_field, select_columns, source_file_field
from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.json_rows import parse_object
from cbatch_cli.data.lines import OverlongLine, content_hash, read_lines
from cbatch_cli.data.openai_batch import looks_like_batch_line
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.records import Record, RecordFiles, RecordReader
from cbatch_cli.data.row import InputPosition, Row
from cbatch_cli.data.streams import open_stream
from cbatch_cli.errors import RowError, RowErrorType, RowFailedError

FIRST_ROWS = 1024
FIRST_BYTES = 8 * 2**20
"""Columns are typed from this many rows or bytes, whichever is less, read before row 1 is given."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlSource:
    """Rows of JSON Lines files. Opening reads the first rows to learn the columns.

    `is_openai` None means: true where most of the first rows look like OpenAI batch lines.
    Raises `UsageError` for a file that cannot be read or a selected column that is not there.
    """

    is_indexed = False
    num_rows: int | None = None

    def __init__(
        self,
        files: Sequence[InputFile],
        *,
        columns: str,
        limit: int | None,
        max_line_bytes: int,
        is_openai: bool | None,
    ) -> None:
        read_records = partial(read_jsonl, max_line_bytes=max_line_bytes)
        self._observer = ColumnObserver()
        num_batch_lines = num_rows = 0
        for record in _first_records(files, read_records):
            if record.error is None:
                num_rows += 1
                num_batch_lines += looks_like_batch_line(record.columns)
                self._observer.observe(record.columns)
        self.column_names = self._observer.column_names
        self.is_openai = num_batch_lines * 2 > num_rows if is_openai is None else is_openai
        self._selected = select_columns(columns, self.column_names)
        self._takes_all = columns == "all"
        self._has_several_files = len(files) > 1
        self.files = tuple(files)
        self._records = RecordFiles(files, read_records, limit=limit, has_header=False)

    @property
    def fraction_read(self) -> float:
        """Share of the input read, 0 to 1; may be asked from another thread."""
        return self._records.fraction_read

    def arrow_schema(self, prompt: PromptColumns) -> pa.Schema:
        """The columns passed through, typed; plain text that prompts are made of is a string."""
        fields = []
        for name in self._selected:
            if name in prompt.text_columns:
                fields.append(pa.field(name, pa.string()))
            elif prompt.kind == "openai" and name == "body":
                fields.append(json_field(name))
            else:
                fields.append(self._observer.field(name))
        if self._has_several_files:
            fields.append(source_file_field(self._selected))
        if self._selected or self._takes_all:
            fields.append(extra_field(self._selected, later_columns=self._takes_all))
        return pa.schema(fields)

    def rows(
        self, prompt: PromptColumns, *, num_skipped: int = 0, start: InputPosition | None = None
    ) -> Iterator[Row]:
        """All rows behind those skipped, those that cannot be read among them."""
        if self._takes_all or prompt.columns_read is None:
            return self._records.rows(None, num_skipped=num_skipped, start=start)
        columns = prompt.columns_read.union(self._selected)
        return self._records.rows(columns, num_skipped=num_skipped, start=start)


def read_jsonl(
    stream: io.BufferedReader, file: InputFile, *, max_line_bytes: int
) -> Iterator[Record]:
    """Each line that is not blank. A hash covers the line without its end and byte order mark."""
    for line in read_lines(stream, max_line_bytes):
        if isinstance(line, OverlongLine):
            message = f"the line is longer than {max_line_bytes} bytes"
            error = RowError(RowErrorType.INVALID_JSON, message)
            yield Record({}, error, line.content_hash, line.num_bytes)
            continue
        # Joined files have a mark in their middle too.
        data = line.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r\n")
        if not data or data.isspace():
            continue
        try:
            yield Record(parse_object(data), None, content_hash(data), len(line))
        except RowFailedError as failure:
            yield Record({}, failure.error, content_hash(data), len(line))


def _first_records(files: Sequence[InputFile], read_records: RecordReader) -> Iterator[Record]:
    num_rows = num_bytes = 0
    for file in files:
        with open_stream(file) as (stream, _):
            for record in read_records(stream, file):
                yield record
                num_rows += 1
                num_bytes += record.num_bytes
                if num_rows >= FIRST_ROWS or num_bytes >= FIRST_BYTES:
                    return
