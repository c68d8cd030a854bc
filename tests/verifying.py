"""Finished outputs of the null engine for tests of `cbatch verify`, and changes to their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.config import build_job_config
from cbatch_cli.job import run_job
from cbatch_cli.verify import verify_output
from tests.null_engine import NULL_LOADER


def run(folder: Path, rows: list[Any], *, output: str = "out.parquet", **options: Any) -> Path:
    """An output of the rows; those that are not objects are lines as they are."""
    source = folder / "in.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source.write_text("\n".join(lines) + "\n")
    settings = {"inputs": (str(source),), "output": f"{folder}/{output}", "max_tokens": 6}
    run_job(build_job_config({**settings, "rows_per_part": 4, **options}), loader=NULL_LOADER)
    return folder / output


def rows_of(number: int) -> list[Any]:
    return [{"prompt": f"p{i}", "more": {"nested": [i]}} for i in range(number)]


def verify(path: Path, **options: Any) -> dict[str, Any]:
    return verify_output(str(path), loader=NULL_LOADER, **options)


def rewrite(path: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """The file with one column changed, and its notes kept."""

    def changed(table: pa.Table) -> pa.Table:
        values = change(table.column(column).to_pylist())
        number = table.column_names.index(column)
        field = table.schema.field(column)
        return table.set_column(number, field, pa.array(values, field.type))

    rewrite_table(path, changed)


def rewrite_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """The file with another table in it, and its notes kept."""
    changed = change(pq.read_table(path))
    notes = pq.read_metadata(path).metadata
    pq.write_table(changed.replace_schema_metadata(notes), path)
