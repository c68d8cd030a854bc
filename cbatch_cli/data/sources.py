"""Where rows come from: JSONL, OpenAI batch lines, CSV and Parquet, on disk, in stdin or remote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, get_args

import pyarrow as pa

from cbatch_cli.data.csv_source import CsvSource
from cbatch_cli.data.formats import detect_format
from cbatch_cli.data.input_files import FileFormat, InputFile, expand_inputs
from cbatch_cli.data.jsonl_source import JsonlSource
from cbatch_cli.data.parquet_source import ParquetSource
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import InputPosition, Row
from cbatch_cli.errors import UsageError


class Source(Protocol):
    """The rows of a run's input. Nothing but its start, or its footers, is read on opening."""

    column_names: tuple[str, ...]
    """The columns found, whichever are passed through."""
    is_openai: bool
    """Whether rows are OpenAI batch lines."""
    is_indexed: bool
    """Whether rows can be skipped by their number alone."""
    files: tuple[InputFile, ...]
    """The files in the order in which they are read."""
    num_rows: int | None
    """None where only reading to the end would tell."""

    @property
    def fraction_read(self) -> float:
        """Share of the input read, 0 to 1; may be asked from another thread."""
        ...

    def arrow_schema(self, prompt: PromptColumns) -> pa.Schema:
        """The columns passed through, those of ours among them; see `data.fields` for notes."""
        ...

    def rows(
        self, prompt: PromptColumns, *, num_skipped: int = 0, start: InputPosition | None = None
    ) -> Iterator[Row]:
        """All rows in order, lazily and in constant memory; may be called again for a new pass.

        With `num_skipped`, from the row of that index on: an indexed source finds it by itself,
        others need `start`, where the row before it ended. A row that cannot be read has an error.
        Raises `UsageError`, after the rows before it, when a file is cut short or corrupt.
        """
        ...


def open_source(
    inputs: Sequence[str],
    *,
    input_format: str = "auto",
    columns: str = "all",
    limit: int | None = None,
    max_line_bytes: int = 64 * 2**20,
    spool_dir: Path | None = None,
) -> Source:
    """Find, check and open the input; see `JobConfig` for what the options mean.

    `spool_dir` is where stdin and pipes are copied to, None for a temporary folder. Raises
    `UsageError` for what is not there, cannot be read, or does not go together.
    """
    return open_files(
        expand_inputs(inputs, spool_dir=spool_dir),
        input_format=input_format,
        columns=columns,
        limit=limit,
        max_line_bytes=max_line_bytes,
    )


def open_files(
    files: Sequence[InputFile],
    *,
    input_format: str = "auto",
    columns: str = "all",
    limit: int | None = None,
    max_line_bytes: int = 64 * 2**20,
) -> Source:
    """The rows of files that have been found; as `open_source` otherwise."""
    file_format = _common_format(files, input_format)
    if file_format == "parquet":
        return ParquetSource(files, columns=columns, limit=limit)
    if file_format == "csv":
        return CsvSource(files, columns=columns, limit=limit, max_line_bytes=max_line_bytes)
    return JsonlSource(
        files,
        columns=columns,
        limit=limit,
        max_line_bytes=max_line_bytes,
        is_openai=None if input_format == "auto" else input_format == "openai",
    )


def _common_format(files: Sequence[InputFile], input_format: str) -> FileFormat:
    if input_format == "openai":
        return "jsonl"
    formats: tuple[FileFormat, ...] = get_args(FileFormat)
    if input_format in formats:
        return formats[formats.index(input_format)]
    found: dict[FileFormat, str] = {}
    for file in files:
        found.setdefault(detect_format(file), file.name)
    if len(found) > 1:
        examples = ", ".join(f"{name} is {file_format}" for file_format, name in found.items())
        raise UsageError(f"the inputs have different formats: {examples}")
    return next(iter(found))
