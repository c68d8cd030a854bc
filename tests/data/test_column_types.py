from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from cbatch_cli.data.column_types import MAX_COLUMNS, MAX_TYPED_NESTING, ColumnObserver
from cbatch_cli.data.fields import INTEGER_KEY, JSON_KEY, note


def field_of(values: list[Any]) -> pa.Field[Any]:
    observer = ColumnObserver()
    for value in values:
        observer.observe({"x": value})
    return observer.field("x")


def is_json(values: list[Any]) -> bool:
    field = field_of(values)
    return field.type == pa.string() and note(field, JSON_KEY) is not None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], pa.int64()),
        ([2**63 - 1, -(2**63)], pa.int64()),
        ([1.5, 2.0], pa.float64()),
        ([1, 2.5], pa.float64()),
        ([True, False], pa.bool_()),
        (["a", ""], pa.string()),
        (["2024-01-01"], pa.string()),
        ([None, None], pa.string()),
        ([None, 1], pa.int64()),
        ([1, math.nan, 3], pa.int64()),
        ([1, math.inf, 3], pa.int64()),
        ([math.nan], pa.string()),
        ([[1, 2], []], pa.list_(pa.int64())),
        ([[1, 2.5]], pa.list_(pa.float64())),
        ([["a"], [None]], pa.list_(pa.string())),
        ([[[1]], [[]]], pa.list_(pa.list_(pa.int64()))),
        ([{"a": 1, "b": "x"}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([{"a": 1}, {"a": None}, None], pa.struct([("a", pa.int64())])),
        ([{"a": 1}, {"a": 0.5}], pa.struct([("a", pa.float64())])),
        ([[{"a": 2**60}, {"a": 1}]], pa.list_(pa.struct([("a", pa.int64())]))),
        (
            [[{"role": "user", "content": "x"}], [{"content": "y", "role": "user"}] * 2],
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        ),
    ],
)
def test_types(values: list[Any], expected: pa.DataType) -> None:
    field = field_of(values)
    assert field.type == expected
    assert not field.metadata


@pytest.mark.parametrize(
    "values",
    [
        [1, "a"],
        [True, 1],
        [[1], "a"],
        [[1, "a"]],
        [[1], ["a"]],
        [[]],
        [[None]],
        [{}],
        [{"a": {}}],
        [{"a": None}],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": None}],
        [{"a": 1}, {"a": "x"}],
        [{"a": 1}, [1]],
        [[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}]],
        # Integers that the float of their column would round.
        [2**53 + 1, 0.5],
        [2**63, 0.5],
        [[2**53 + 1, 0.5]],
        # Integers beyond 64 bits inside a list.
        [[2**63]],
    ],
)
def test_json_texts(values: list[Any]) -> None:
    assert is_json(values)


@pytest.mark.parametrize("big", [2**63, -(2**63) - 1, 123456789012345678901234567890])
def test_integers_beyond_64_bits_make_a_column_of_digits(big: int) -> None:
    field = field_of([1, big, 2])
    assert field.type == pa.string()
    assert note(field, INTEGER_KEY)


def test_a_tenth_of_misfits_is_the_limit() -> None:
    assert field_of([1] * 9 + ["a"]).type == pa.int64()
    assert is_json([1] * 9 + ["a", "b"])
    assert field_of([1] * 90 + ["a"] * 10).type == pa.int64()
    assert is_json([1] * 90 + ["a"] * 11)
    assert field_of([1] * 9 + ["a"] + [None] * 50).type == pa.int64()
    assert is_json([1] * 9 + ["a", "b"] + [None] * 50)
    assert field_of([[1]] * 9 + ["a"]).type == pa.list_(pa.int64())


def test_integers_and_floats_count_as_one_type() -> None:
    assert field_of([1] * 5 + [0.5] * 5 + ["a"]).type == pa.float64()


def test_what_is_nested_deeply_is_a_json_text() -> None:
    value: Any = 1
    for _ in range(MAX_TYPED_NESTING):
        value = [value]
    assert pa.types.is_list(field_of([value]).type)
    assert is_json([[value]])
    for _ in range(150):
        value = [value]
    assert is_json([value])


def test_columns_beyond_the_limit_are_left_out() -> None:
    observer = ColumnObserver()
    observer.observe({f"c{i}": i for i in range(MAX_COLUMNS + 5)})
    observer.observe({"c0": 1, "late": 1})
    assert observer.column_names == tuple(f"c{i}" for i in range(MAX_COLUMNS))


def test_names_in_order_of_first_appearance() -> None:
    observer = ColumnObserver()
    observer.observe({"b": 1, "a": 2})
    observer.observe({"c": 1, "a": 2})
    assert observer.column_names == ("b", "a", "c")
