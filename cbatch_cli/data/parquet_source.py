"""Parquet files, a row group at a time, every column exact in its Arrow type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data.arrow_values import content_hashes, storable_type, to_python
from cbatch_cli.data.fields import OWN_KEYS, select_columns, source_file_field
from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import ArrowRow, InputPosition, Row
from cbatch_cli.errors import RowError, RowErrorType, UsageError

MAX_BATCH_ROWS = 512
BATCH_BYTES = 4 * 2**20
"""Batches are cut so that they come to about this size once decompressed."""
READ_BYTES = 2**20


class ParquetSource:
    """Rows of Parquet files. Opening reads their footers.

    Columns are those of all files; a file without one of them has nulls there, and types widen
    where they differ. Raises `UsageError` for a file that cannot be read, columns that do not go
    together, or a selected column that is not there.
    """

    is_openai = False
    is_indexed = True
    num_rows: int | None

    def __init__(self, files: Sequence[InputFile], *, columns: str, limit: int | None) -> None:
        self.files = tuple(files)
        self._limit = limit
        self._schema, num_rows = _read_footers(files)
        self.num_rows = num_rows if limit is None else min(num_rows, limit)
        self.column_names = tuple(self._schema.names)
        self._selected = select_columns(columns, self.column_names)
        self._num_read = 0

    @property
    def fraction_read(self) -> float:
        """Share of the rows read, 0 to 1; may be asked from another thread."""
        return self._num_read / self.num_rows if self.num_rows else 1.0

    def arrow_schema(self, prompt: PromptColumns) -> pa.Schema:
        """The columns passed through, with the types they have, whatever the prompt."""
        fields = [self._schema.field(name) for name in self._selected]
        if len(self.files) > 1:
            fields.append(source_file_field(self._selected))
        return pa.schema(fields)

    def rows(
        self, prompt: PromptColumns, *, num_skipped: int = 0, start: InputPosition | None = None
    ) -> Iterator[Row]:
        """All rows behind those skipped, whose row groups are not read.

        One with text that is not UTF-8 has an error and no columns.
        """
        self._num_read = num_skipped
        num_before = 0
        if self._num_read == self._limit:
            return
        needed = prompt.columns_read
        read = [name for name in self.column_names if needed is None or name in needed]
        names = [name for name in self.column_names if name in read or name in self._selected]
        for file in self.files:
            with _open(file) as parquet:
                first_row = max(0, num_skipped - num_before)
                num_before += parquet.metadata.num_rows
                for batch in _read_batches(parquet, self._schema, names, first_row):
                    for row in self._rows_of(batch, read, file.name, self._num_read):
                        self._num_read += 1
                        yield row
                        if self._num_read == self._limit:
                            return

    def _rows_of(
        self, batch: pa.RecordBatch, read: Sequence[str], source_file: str, first_index: int
    ) -> Iterator[Row]:
        hashes = content_hashes(batch)
        if not _is_valid(batch):
            if batch.num_rows == 1:
                yield Row(first_index, {}, _NOT_UTF8, hashes[0], source_file)
                return
            for offset in range(batch.num_rows):
                row = batch.slice(offset, 1)
                yield from self._rows_of(row, read, source_file, first_index + offset)
            return
        values = [to_python(batch.column(name)) for name in read]
        passed = batch.select(list(self._selected))
        num_bytes = passed.nbytes // batch.num_rows
        for offset, content_hash in enumerate(hashes):
            columns = {name: column[offset] for name, column in zip(read, values, strict=True)}
            arrow = ArrowRow(passed, offset, num_bytes) if self._selected else None
            yield Row(first_index + offset, columns, None, content_hash, source_file, arrow)


_NOT_UTF8 = RowError(RowErrorType.INVALID_JSON, "the row holds text that is not UTF-8")


def _is_valid(batch: pa.RecordBatch) -> bool:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _read_footers(files: Sequence[InputFile]) -> tuple[pa.Schema, int]:
    schema = pa.schema([])
    num_rows = 0
    for file in files:
        with _open(file) as parquet:
            num_rows += parquet.metadata.num_rows
            found = _storable_schema(parquet.schema_arrow, file)
        try:
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except pa.ArrowException as error:
            raise UsageError(f"{file.name} does not go with {files[0].name}: {error}") from error
    return schema, num_rows


def _storable_schema(schema: pa.Schema, file: InputFile) -> pa.Schema:
    if not schema.names:
        raise UsageError(f"{file.name} has no columns")
    fields = []
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise UsageError(f"{file.name} has more than one column {field.name!r}")
        # In the answers of an earlier run these notes would make a column of the input ours.
        notes = {key: text for key, text in (field.metadata or {}).items() if key not in OWN_KEYS}
        data_type = storable_type(field.type)
        fields.append(pa.field(field.name, data_type, field.nullable, metadata=notes or None))
    return pa.schema(fields)


def _read_batches(
    parquet: pq.ParquetFile, schema: pa.Schema, names: Sequence[str], first_row: int
) -> Iterator[pa.RecordBatch]:
    """The named columns in the types of `schema`, from `first_row` of the file on.

    Columns that the file lacks are nulls.
    """
    present = [name for name in names if name in parquet.schema_arrow.names]
    for number in range(parquet.num_row_groups):
        row_group = parquet.metadata.row_group(number)
        if first_row >= row_group.num_rows:
            first_row -= row_group.num_rows
            continue
        row_bytes = row_group.total_byte_size // max(1, row_group.num_rows)
        batch_rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))
        # Threads and read-ahead would hold more of the file in memory than a batch needs.
        for batch in parquet.iter_batches(
            batch_rows, row_groups=[number], columns=present, use_threads=False
        ):
            num_skipped = min(first_row, batch.num_rows)
            first_row -= num_skipped
            if num_skipped < batch.num_rows:
                rest = batch.slice(num_skipped)
                yield _conform(rest, [schema.field(name) for name in names])


def _conform(batch: pa.RecordBatch, fields: Sequence[pa.Field[Any]]) -> pa.RecordBatch:
    arrays = []
    for field in fields:
        if field.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


@contextmanager
def _open(file: InputFile) -> Iterator[pq.ParquetFile]:
    """The file; what Arrow raises, here or inside of the block, comes as `UsageError`."""
    try:
        with ExitStack() as stack:
            # A path lets Arrow read by itself; an object in Python takes the interpreter's lock.
            source: Any = stack.enter_context(file.open()) if file.is_remote else file.location
            yield stack.enter_context(
                pq.ParquetFile(
                    source,
                    buffer_size=READ_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
            )
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot read {file.name}: {error}") from error
