"""Rows, results and a plain column encoder for tests of the output side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data.output_schema import output_schema
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.parquet_sink import ParquetSink
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import RowError, RowErrorType
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason

PASSTHROUGH = pa.schema(
    [
        ("prompt", pa.string()),
        ("score", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("always_null", pa.string()),
    ]
)
STARTED = datetime(2025, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


class PlainEncoder:
    """Values as they are; what a row lacks is null."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def encode(self, rows: Sequence[Row]) -> list[pa.Array[Any]]:
        return [
            pa.array([row.columns.get(field.name) for row in rows], field.type)
            for field in self._schema
        ]


def make_row(index: int, *, text_bytes: int = 0) -> Row:
    """Row `index`; every seventh could not be read."""
    if index % 7 == 3:
        return Row(index, error=RowError(RowErrorType.INVALID_JSON, "not JSON"))
    columns = {
        "prompt": f"prompt {index} é" + "x" * text_bytes,
        "score": index / 4,
        "tags": [str(index)] * (index % 3),
    }
    return Row(index, columns, content_hash=index.to_bytes(16, "big"))


def make_result(row: Row, *, with_token_ids: bool = False) -> RowResult:
    """What came of `row`."""
    if row.error is not None:
        return RowResult(
            row_index=row.index,
            completion=None,
            finish_reason=FinishReason.ERROR,
            error=row.error,
            metrics=RequestMetrics(),
        )
    return RowResult(
        row_index=row.index,
        completion=f"answer {row.index} ✓",
        finish_reason=FinishReason.STOP if row.index % 2 else FinishReason.LENGTH,
        error=None,
        metrics=RequestMetrics(
            prompt_tokens=row.index + 1,
            completion_tokens=3,
            queue_s=0.5,
            itl_p99_s=0.25,
            started_at=STARTED,
            finished_at=STARTED,
            worker="host:1",
        ),
        token_ids=(row.index, 1, 2) if with_token_ids else None,
    )


def make_sink(target: OutputTarget, *, rows_per_part: int = 4, **options: Any) -> ParquetSink:
    """A sink for the rows of `make_row`, its folders made."""
    target.work_dir.mkdir(parents=True, exist_ok=True)
    if target.is_directory:
        target.path.mkdir(exist_ok=True)
    return ParquetSink(
        target=target,
        schema=output_schema(PASSTHROUGH),
        encoder=PlainEncoder(PASSTHROUGH),
        rows_per_part=rows_per_part,
        metadata={"stage": "start"},
        **options,
    )


def fill(sink: ParquetSink, order: Iterable[int]) -> None:
    """Finish the rows of `make_row` in the given order."""
    for index in order:
        row = make_row(index)
        sink.add(row, make_result(row))


def write_rows(target: OutputTarget, order: Iterable[int], *, rows_per_part: int = 4) -> Path:
    """A whole run of the sink."""
    sink = make_sink(target, rows_per_part=rows_per_part)
    fill(sink, order)
    return sink.finish({"stage": "end", "rows": 1})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a file or a folder of parts holds, checksums checked."""
    table = pq.read_table(path, page_checksum_verification=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def expected_rows(num_rows: int) -> list[dict[str, Any]]:
    """What the output of rows 0 to `num_rows` holds."""
    return [_expected_row(make_row(index)) for index in range(num_rows)]


def _expected_row(row: Row) -> dict[str, Any]:
    result = make_result(row)
    metrics = result.metrics
    error = result.error
    return {
        **{name: row.columns.get(name) for name in PASSTHROUGH.names},
        "row_index": row.index,
        "completion": result.completion,
        "finish_reason": result.finish_reason.value,
        "error": error
        and {"type": error.type.value, "message": error.message, "retryable": error.retryable},
        "metrics": {
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": metrics.completion_tokens,
            "preemptions": 0,
            "attempt": 1,
            "queue_s": metrics.queue_s,
            "prefill_s": None,
            "decode_s": None,
            "ttft_s": None,
            "itl_mean_s": None,
            "itl_p99_s": metrics.itl_p99_s,
            "e2e_s": None,
            "started_at": metrics.started_at,
            "finished_at": metrics.finished_at,
            "worker": metrics.worker,
        },
    }
