"""Some of the rows that a finished output holds, with the columns that they were made from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data.arrow_values import to_python
from cbatch_cli.data.fields import EXTRA_KEY, INTEGER_KEY, JSON_KEY, SOURCE_FILE_KEY, note
from cbatch_cli.data.parquet_results import decode_result, own_names
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import OutputError


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredRow:
    """A row of an output; `row` has the columns that were passed through, and the input's index."""

    row: Row
    result: RowResult


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSample:
    """Rows with an answer, in the order of the input, and how many rows there are in all."""

    answered: tuple[AnsweredRow, ...]
    column_names: tuple[str, ...]
    """Of the columns that were passed through."""
    num_rows: int
    num_failed: int


def sample_output(
    files: Sequence[Path], *, num_rows: int, seed: int, with_token_ids: bool
) -> OutputSample:
    """Draw `num_rows` rows with an answer, or all if there are fewer; reads errors of all rows.

    The same arguments give the same rows. Raises `OutputError` for what cannot be read.
    """
    drawn: list[tuple[Path, int, int]] = []
    noise = random.Random(seed)
    num_seen = num_failed = num_answered = 0
    for path in files:
        with _open(path) as file:
            error_name = own_names(file, with_token_ids=with_token_ids)[3]
            for group in range(file.num_row_groups):
                errors = file.read_row_group(group, columns=[error_name]).column(0)
                num_seen += len(errors)
                for offset, has_answer in enumerate(errors.is_null().to_pylist()):
                    if not has_answer:
                        num_failed += 1
                        continue
                    # Each row so far is among those drawn with the same chance.
                    place = num_answered
                    if num_answered >= num_rows:
                        place = noise.randrange(num_answered + 1)
                    num_answered += 1
                    if place < len(drawn):
                        drawn[place] = (path, group, offset)
                    elif place < num_rows:
                        drawn.append((path, group, offset))
    names: tuple[str, ...] = ()
    answered = []
    for path in files:
        with _open(path) as file:
            own = own_names(file, with_token_ids=with_token_ids)
            names = tuple(file.schema_arrow.names[: -len(own)])
            for group in sorted({group for other, group, _ in drawn if other == path}):
                offsets = sorted(o for other, g, o in drawn if (other, g) == (path, group))
                table = file.read_row_group(group)
                answered += [_answered(table.slice(offset, 1), own) for offset in offsets]
    answered.sort(key=lambda entry: entry.row.index)
    return OutputSample(
        answered=tuple(answered), column_names=names, num_rows=num_seen, num_failed=num_failed
    )


def _answered(table: pa.Table, own: Sequence[str]) -> AnsweredRow:
    result = decode_result([table.column(name)[0].as_py() for name in own])
    columns: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for field in list(table.schema)[: -len(own)]:
        if note(field, SOURCE_FILE_KEY):
            continue
        (value,) = to_python(table.column(field.name).combine_chunks())
        if note(field, EXTRA_KEY):
            extra = {} if value is None else orjson.loads(value)
        elif value is not None and note(field, JSON_KEY):
            columns[field.name] = orjson.loads(value)
        elif value is not None and note(field, INTEGER_KEY):
            columns[field.name] = int(value)
        else:
            columns[field.name] = value
    return AnsweredRow(row=Row(result.row_index, {**columns, **extra}), result=result)


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """The file; what Arrow raises, here or inside of the block, comes as `OutputError`."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot read back {path}: {error}") from error
