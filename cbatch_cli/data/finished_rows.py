"""Some of the rows that a finished output holds, once it is known to hold all that it should."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data.arrow_values import to_python
from cbatch_cli.data.fields import EXTRA_KEY, INTEGER_KEY, JSON_KEY, SOURCE_FILE_KEY, note
from cbatch_cli.data.output_schema import find_own_columns
from cbatch_cli.data.parquet_results import decode_result
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import OutputError, UsageError
from cbatch_cli.shard import WHOLE, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRows:
    """What a run says of the rows that it wrote, and of the columns that are ours."""

    num_rows: int
    num_failed: int
    rows_per_part: int
    shard: Shard = WHOLE
    output_column: str = "completion"
    with_token_ids: bool = False

    def indices(self, positions: range) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The `row_index` of the rows at these places of the output."""
        block, offset = np.divmod(np.arange(positions.start, positions.stop), self.rows_per_part)
        rows: np.ndarray[Any, np.dtype[np.int64]] = (
            block * self.shard.count + self.shard.index
        ) * self.rows_per_part + offset
        return rows


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
    files: Sequence[Path], written: WrittenRows, *, num_rows: int, seed: int
) -> OutputSample:
    """Draw `num_rows` rows with an answer, or all if there are fewer.

    Indices and errors of all rows are read. The same arguments give the same rows. Raises
    `UsageError` for rows or columns that are not those that were written, `OutputError` for what
    cannot be read.
    """
    _check_num_rows(files, written)
    drawn: list[tuple[Path, int, int]] = []
    noise = random.Random(seed)
    num_seen = num_failed = num_answered = 0
    for path in files:
        with _open(path) as file:
            own = _own_columns(path, file, written)
            for group in range(file.num_row_groups):
                failed = _read_checked(path, file, group, own, written, first=num_seen)
                num_seen += len(failed)
                num_failed += sum(failed)
                for offset in (
                    offset for offset, has_failed in enumerate(failed) if not has_failed
                ):
                    # Each row so far is among those drawn with the same chance.
                    place = num_answered
                    if num_answered >= num_rows:
                        place = noise.randrange(num_answered + 1)
                    num_answered += 1
                    if place < len(drawn):
                        drawn[place] = (path, group, offset)
                    elif place < num_rows:
                        drawn.append((path, group, offset))
    if num_failed != written.num_failed:
        raise UsageError(
            f"{_place(files)} holds {num_failed:,} rows with an error, and the run that wrote it "
            f"had {written.num_failed:,}"
        )
    names: tuple[str, ...] = ()
    answered = []
    for path in files:
        with _open(path) as file:
            own = _own_columns(path, file, written)
            names = tuple(file.schema_arrow.names[: -len(own)])
            for group in sorted({group for other, group, _ in drawn if other == path}):
                offsets = sorted(o for other, g, o in drawn if (other, g) == (path, group))
                table = file.read_row_group(group)
                answered += [_answered(path, table.slice(offset, 1), own) for offset in offsets]
    answered.sort(key=lambda entry: entry.row.index)
    return OutputSample(
        answered=tuple(answered), column_names=names, num_rows=num_seen, num_failed=num_failed
    )


def _check_num_rows(files: Sequence[Path], written: WrittenRows) -> None:
    num_rows = 0
    for path in files:
        with _open(path) as file:
            num_rows += file.metadata.num_rows
    if num_rows != written.num_rows:
        raise UsageError(
            f"{_place(files)} holds {num_rows:,} rows, and the run that wrote it had "
            f"{written.num_rows:,}"
        )


def _own_columns(path: Path, file: pq.ParquetFile, written: WrittenRows) -> list[str]:
    return find_own_columns(
        file.schema_arrow,
        path=path,
        output_column=written.output_column,
        return_token_ids=written.with_token_ids,
    )


def _read_checked(
    path: Path,
    file: pq.ParquetFile,
    group: int,
    own: Sequence[str],
    written: WrittenRows,
    *,
    first: int,
) -> list[bool]:
    """Which rows of a row group have an error; `first` is the place of its first row."""
    table = file.read_row_group(group, columns=[own[0], own[3]])
    found = table.column(own[0]).to_numpy()
    expected = written.indices(range(first, first + len(found)))
    if not np.array_equal(found, expected):
        place = int(np.flatnonzero(found != expected)[0])
        index = table.column(own[0])[place].as_py()
        raise UsageError(
            f"{path} is not as it was written: where row {expected[place]} should be is row {index}"
        )
    failed = cast("list[bool]", table.column(own[3]).is_valid().to_pylist())
    if _num_nulls(file, group, own[1]) != sum(failed):
        nulls = file.read_row_group(group, columns=[own[1]]).column(0).is_null().to_pylist()
        for index, has_failed, is_null in zip(found, failed, nulls, strict=True):
            if has_failed != is_null:
                what = "neither an answer nor" if is_null else "both an answer and"
                raise UsageError(f"row {index} of {path} has {what} an error")
    return failed


def _num_nulls(file: pq.ParquetFile, group: int, name: str) -> int | None:
    """The nulls of a plain column, from the footer, which saves reading it; None if not told."""
    metadata = file.metadata
    leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    statistics = metadata.row_group(group).column(leaves.index(name)).statistics
    return None if statistics is None else statistics.null_count


def _answered(path: Path, table: pa.Table, own: Sequence[str]) -> AnsweredRow:
    values = [table.column(name)[0].as_py() for name in own]
    try:
        result = decode_result(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"row {values[0]} of {path} holds what no run writes: {error}") from None
    if len(own) > 5 and result.token_ids is None:
        raise UsageError(f"row {values[0]} of {path} has an answer and no {own[5]}")
    # By the standard library, which reads integers of any size exactly.
    columns: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for field in list(table.schema)[: -len(own)]:
        if note(field, SOURCE_FILE_KEY):
            continue
        (value,) = to_python(table.column(field.name).combine_chunks())
        if note(field, EXTRA_KEY):
            extra = {} if value is None else json.loads(value)
        elif value is not None and note(field, JSON_KEY):
            columns[field.name] = json.loads(value)
        elif value is not None and note(field, INTEGER_KEY):
            columns[field.name] = int(value)
        else:
            columns[field.name] = value
    return AnsweredRow(row=Row(result.row_index, {**columns, **extra}), result=result)


def _place(files: Sequence[Path]) -> Path:
    return files[0] if len(files) == 1 else files[0].parent


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """The file; what Arrow raises, here or inside of the block, comes as `OutputError`."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise OutputError(f"cannot read back {path}: {error}") from error
