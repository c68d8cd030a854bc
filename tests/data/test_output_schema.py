"""The fixed columns of the output."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cbatch_cli.data.output_schema import FinishedRow, output_schema, to_record_batch
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import RowError, RowErrorType, UsageError
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason
from tests.data.output_fakes import (
    PASSTHROUGH,
    PlainEncoder,
    expected_rows,
    make_result,
    make_row,
)

OWN = ["row_index", "completion", "finish_reason", "error", "metrics"]


def test_columns_passed_through_come_first_and_unchanged() -> None:
    passthrough = pa.schema(
        [pa.field("z", pa.int8(), metadata={b"cbatch.json": b"1"}), pa.field("a", pa.string())],
        metadata={b"huggingface": b"{}"},
    )

    schema = output_schema(passthrough)

    assert schema.names == ["z", "a", *OWN]
    assert schema.field("z").equals(passthrough.field("z"), check_metadata=True)
    assert schema.metadata is None


def test_types_are_those_users_rely_on() -> None:
    schema = output_schema(pa.schema([]), return_token_ids=True)

    metrics = {field.name: str(field.type) for field in schema.field("metrics").type}
    assert {name: str(schema.field(name).type) for name in schema.names if name != "metrics"} == {
        "row_index": "int64",
        "completion": "string",
        "finish_reason": "string",
        "error": "struct<type: string, message: string, retryable: bool>",
        "token_ids": "list<item: int32>",
    }
    assert metrics == {
        **dict.fromkeys(["prompt_tokens", "cached_tokens", "completion_tokens"], "int32"),
        **dict.fromkeys(["preemptions", "attempt"], "int16"),
        **dict.fromkeys(["queue_s", "prefill_s", "decode_s", "ttft_s"], "float"),
        **dict.fromkeys(["itl_mean_s", "itl_p99_s", "e2e_s"], "float"),
        **dict.fromkeys(["started_at", "finished_at"], "timestamp[us, tz=UTC]"),
        "worker": "string",
    }


def test_a_clashing_name_of_ours_gets_a_prefix_until_it_is_free() -> None:
    passthrough = pa.schema(
        [("error", pa.int64()), ("Metrics", pa.int64()), ("cbatch_error", pa.int64())]
    )

    names = output_schema(passthrough, output_column="answer").names

    assert names == [
        *["error", "Metrics", "cbatch_error"],
        *["row_index", "answer", "finish_reason", "cbatch_cbatch_error", "cbatch_metrics"],
    ]


@pytest.mark.parametrize("name", ["row_index", "Error", "metrics", "finish_reason", ""])
def test_the_output_column_cannot_take_another_name_of_ours(name: str) -> None:
    with pytest.raises(UsageError, match="the output column cannot be named"):
        output_schema(PASSTHROUGH, output_column=name)


def test_token_ids_may_name_the_output_column_unless_they_are_asked_for() -> None:
    assert "token_ids" in output_schema(PASSTHROUGH, output_column="token_ids").names
    with pytest.raises(UsageError, match="token_ids"):
        output_schema(PASSTHROUGH, output_column="token_ids", return_token_ids=True)


def test_rows_and_results_become_one_batch() -> None:
    rows = [make_row(index) for index in range(9)]
    finished = [FinishedRow(row, make_result(row, with_token_ids=True)) for row in rows]
    schema = output_schema(PASSTHROUGH, return_token_ids=True)

    batch = to_record_batch(finished, schema=schema, encoder=PlainEncoder(PASSTHROUGH))

    assert batch.schema.equals(schema)
    batch.validate(full=True)
    token_ids = [None if index % 7 == 3 else [index, 1, 2] for index in range(9)]
    assert batch.column("token_ids").to_pylist() == token_ids
    assert batch.drop_columns(["token_ids"]).to_pylist() == expected_rows(9)


def test_what_no_column_can_hold_does_not_lose_the_row() -> None:
    row = Row(0)
    result = RowResult(
        row_index=0,
        completion="half \ud83d",
        finish_reason=FinishReason.ERROR,
        error=RowError(RowErrorType.BAD_TYPE, "column '\udcff'"),
        metrics=RequestMetrics(preemptions=100_000, worker="w\udc80"),
    )

    batch = to_record_batch(
        [FinishedRow(row, result)],
        schema=output_schema(PASSTHROUGH),
        encoder=PlainEncoder(PASSTHROUGH),
    )

    (values,) = batch.to_pylist()
    assert values["completion"] == "half ?"
    assert values["error"]["message"] == "column '?'"
    assert values["metrics"]["preemptions"] == 2**15 - 1
    assert values["metrics"]["worker"] == "w?"
