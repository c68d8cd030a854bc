"""The columns of the output, fixed before the first row, and finished rows in that form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from cbatch_cli.data.json_text import valid_unicode
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import UsageError
from cbatch_cli.metrics import RequestMetrics

INT16_MAX = 2**15 - 1
RESERVED_NAMES = ("row_index", "finish_reason", "error", "metrics", "token_ids")

ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string()), ("retryable", pa.bool_())])

METRICS_TYPE = pa.struct(
    [
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("preemptions", pa.int16()),
        ("attempt", pa.int16()),
        ("queue_s", pa.float32()),
        ("prefill_s", pa.float32()),
        ("decode_s", pa.float32()),
        ("ttft_s", pa.float32()),
        ("itl_mean_s", pa.float32()),
        ("itl_p99_s", pa.float32()),
        ("e2e_s", pa.float32()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("finished_at", pa.timestamp("us", tz="UTC")),
        ("worker", pa.string()),
    ]
)


class FinishedRow(NamedTuple):
    """An input row and what came of it."""

    row: Row
    result: RowResult


class RowEncoder(Protocol):
    """Turns the passed-through columns of rows into arrays of the fixed schema."""

    def encode(self, rows: Sequence[Row]) -> list[pa.Array[Any]]:
        """One array for each passed-through field, with one value for each row."""
        ...


def output_schema(
    passthrough: pa.Schema, *, output_column: str = "completion", return_token_ids: bool = False
) -> pa.Schema:
    """The output's columns: those passed through, unchanged, then ours.

    A name of ours that the input uses gets the prefix `cbatch_`; letter case makes no difference,
    because SQL engines see none. Raises `UsageError` when `output_column` is a name of ours.
    """
    own = {
        "row_index": pa.int64(),
        output_column: pa.string(),
        "finish_reason": pa.string(),
        "error": ERROR_TYPE,
        "metrics": METRICS_TYPE,
    }
    if return_token_ids:
        own["token_ids"] = pa.list_(pa.int32())
    reserved = RESERVED_NAMES[: 5 if return_token_ids else 4]
    if not output_column or output_column.lower() in reserved:
        raise UsageError(
            f"the output column cannot be named {output_column!r}; "
            f"the output has these columns too: {', '.join(reserved)}"
        )
    taken = {name.lower() for name in passthrough.names}
    fields = list(passthrough)
    for name, kind in own.items():
        while name.lower() in taken:
            name = f"cbatch_{name}"
        taken.add(name.lower())
        fields.append(pa.field(name, kind))
    # Schema metadata of the input (pandas, huggingface) describes columns that are no longer all.
    return pa.schema(fields)


def find_own_columns(
    schema: pa.Schema, *, path: Path, output_column: str, return_token_ids: bool
) -> list[str]:
    """The names that our columns have in the output at `path`, prefixes included.

    Raises `UsageError` naming the column of ours that is missing, elsewhere or of another type.
    """
    own = output_schema(
        pa.schema([]), output_column=output_column, return_token_ids=return_token_ids
    )
    # From the end, for ours are the last columns, and one of the input may have the name of ours.
    num_left, missing = len(schema), []
    for position, name in reversed(list(enumerate(own.names))):
        if num_left and _is_own_name(schema.names[num_left - 1], name):
            num_left -= 1
        else:
            missing.append(position)
    expected = output_schema(
        pa.schema(list(schema)[:num_left]),
        output_column=output_column,
        return_token_ids=return_token_ids,
    )
    fields = list(expected)[num_left:]
    if missing:
        if len(missing) > 1 and set(own.names) <= set(schema.names):
            raise UsageError(f"{path} has its columns in another order than the run wrote them")
        name = fields[missing[-1]].name
        raise UsageError(
            f"{path} has no column {name!r} behind those of the input, where the run wrote it"
        )
    for field, found in zip(fields, list(schema)[num_left:], strict=True):
        if field.name != found.name:
            raise UsageError(f"{path} has no column {field.name!r}, but {found.name!r}")
        if field.type != found.type:
            raise UsageError(
                f"{path} has a column {field.name!r} of type {found.type}, not {field.type}"
            )
    return [field.name for field in fields]


def _is_own_name(found: str, name: str) -> bool:
    while found != name and found.startswith("cbatch_"):
        found = found.removeprefix("cbatch_")
    return found == name


def to_record_batch(
    finished: Sequence[FinishedRow], *, schema: pa.Schema, encoder: RowEncoder
) -> pa.RecordBatch:
    """Finished rows, in the order given, as one batch of `schema` (made by `output_schema`)."""
    results = [entry.result for entry in finished]
    arrays = [
        *encoder.encode([entry.row for entry in finished]),
        pa.array([result.row_index for result in results], pa.int64()),
        _text([result.completion for result in results]),
        _text([result.finish_reason.value for result in results]),
        _errors(results),
        _metrics([result.metrics for result in results]),
    ]
    if len(arrays) < len(schema):
        token_ids = [result.token_ids for result in results]
        arrays.append(pa.array(token_ids, pa.list_(pa.int32())))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _text(values: Sequence[str | None]) -> pa.Array[Any]:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([v if v is None else valid_unicode(v) for v in values], pa.string())


def _errors(results: Sequence[RowResult]) -> pa.Array[Any]:
    errors = [result.error for result in results]
    return pa.StructArray.from_arrays(
        [
            _text([error.type.value if error else None for error in errors]),
            _text([error.message if error else None for error in errors]),
            pa.array([error.retryable if error else None for error in errors], pa.bool_()),
        ],
        fields=list(ERROR_TYPE),
        mask=pa.array([error is None for error in errors], pa.bool_()),
    )


def _metrics(metrics: Sequence[RequestMetrics]) -> pa.Array[Any]:
    arrays = []
    for field in METRICS_TYPE:
        values: list[Any] = [getattr(entry, field.name) for entry in metrics]
        if field.type == pa.int16():
            values = [min(value, INT16_MAX) for value in values]
        arrays.append(_text(values) if field.type == pa.string() else pa.array(values, field.type))
    return pa.StructArray.from_arrays(arrays, fields=list(METRICS_TYPE))


BatchEncoder = Callable[[Sequence[FinishedRow]], pa.RecordBatch]
"""`to_record_batch` with the schema and the encoder of a run bound."""
