"""Opening an input and reading all of it, as a job does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cbatch_cli.data.columns import ColumnEncoder
from cbatch_cli.data.prompt_columns import PromptColumns, choose_prompt_columns
from cbatch_cli.data.row import Row
from cbatch_cli.data.sources import Source, open_source


def choose(source: Source, *, prompt_column: str | None = None) -> PromptColumns:
    """The prompt columns as a run without further options chooses them."""
    return choose_prompt_columns(
        source.column_names,
        prompt_column=prompt_column,
        messages_column=None,
        has_template=False,
        is_openai=source.is_openai,
    )


def read_rows(
    inputs: Path | str | Sequence[Path | str], *, prompt_column: str | None = None, **options: Any
) -> list[Row]:
    """All rows of `inputs`."""
    source = open_inputs(inputs, **options)
    return list(source.rows(choose(source, prompt_column=prompt_column)))


def read_table(
    inputs: Path | str | Sequence[Path | str], *, prompt_column: str | None = None, **options: Any
) -> pa.Table:
    """The passed-through columns of all rows, encoded in uneven batches."""
    source = open_inputs(inputs, **options)
    prompt = choose(source, prompt_column=prompt_column)
    schema = source.arrow_schema(prompt)
    encoder = ColumnEncoder(schema)
    rows = list(source.rows(prompt))
    batches = [rows[start : start + 7] for start in range(0, len(rows), 7)]
    return pa.Table.from_batches(
        [pa.RecordBatch.from_arrays(encoder.encode(batch), schema=schema) for batch in batches],
        schema=schema,
    )


def open_inputs(inputs: Path | str | Sequence[Path | str], **options: Any) -> Source:
    """`open_source` for one path or several."""
    names = [inputs] if isinstance(inputs, Path | str) else inputs
    return open_source([str(name) for name in names], **options)


def write_jsonl(path: Path, values: Iterable[Any]) -> Path:
    """A JSON Lines file of `values`; returns its path."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def errors(rows: Sequence[Row]) -> list[str | None]:
    """The error type of each row."""
    return [row.error.type.value if row.error else None for row in rows]
