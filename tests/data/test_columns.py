from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch_cli.data.column_types import ColumnObserver
from cbatch_cli.data.columns import ColumnEncoder
from cbatch_cli.data.fields import (
    EXTRA_KEY,
    INTEGER_KEY,
    JSON_KEY,
    extra_field,
    integer_text_field,
    json_field,
    note,
    source_file_field,
)
from cbatch_cli.data.row import ArrowRow, Row
from cbatch_cli.errors import RowError, RowErrorType

UNREADABLE = RowError(RowErrorType.INVALID_JSON, "broken")


def encode(fields: Sequence[pa.Field[Any]], *rows: dict[str, Any]) -> list[list[Any]]:
    """The encoded columns of `rows`, as lists."""
    schema = pa.schema(fields)
    arrays = ColumnEncoder(schema).encode([Row(i, row) for i, row in enumerate(rows)])
    assert [array.type for array in arrays] == schema.types
    for array in arrays:
        array.validate(full=True)
    return [array.to_pylist() for array in arrays]


def encode_one(field: pa.Field[Any], *values: Any) -> tuple[list[Any], list[Any]]:
    """The cells of one column and the extra column beside it."""
    extra = extra_field([field.name], later_columns=True)
    cells, extras = encode([field, extra], *[{field.name: value} for value in values])
    return cells, [None if text is None else json.loads(text) for text in extras]


ANY_VALUE = [None, True, 1, 1.0, 1.5, "a", [], [1], ["a"], {}, {"a": 1}, {"a": "x"}]


@pytest.mark.parametrize(
    ("data_type", "fits"),
    [
        (pa.string(), ["a"]),
        (pa.bool_(), [True]),
        (pa.int64(), [1]),
        (pa.float64(), [1, 1.0, 1.5]),
        (pa.list_(pa.int64()), [[], [1]]),
        (pa.list_(pa.string()), [[], ["a"]]),
        (pa.struct([("a", pa.int64())]), [{"a": 1}]),
        (pa.list_(pa.list_(pa.int64())), [[]]),
    ],
)
def test_only_values_of_a_columns_type_go_into_it(data_type: pa.DataType, fits: list[Any]) -> None:
    cells, extras = encode_one(pa.field("x", data_type), *ANY_VALUE)
    for value, cell, extra in zip(ANY_VALUE, cells, extras, strict=True):
        # By repr, under which true is not 1.
        if repr(value) in map(repr, fits):
            assert cell == value
            assert extra is None
        elif value is None:
            assert (cell, extra) == (None, None)
        else:
            assert cell is None
            assert repr(extra) == repr({"x": value})


def test_integers_are_never_rounded() -> None:
    cells, extras = encode_one(pa.field("x", pa.int64()), 2**63 - 1, -(2**63), 2**63, 10**400)
    assert cells == [2**63 - 1, -(2**63), None, None]
    assert extras == [None, None, {"x": 2**63}, {"x": 10**400}]
    cells, extras = encode_one(pa.field("x", pa.float64()), 2**53, 2**53 + 1, 10**400)
    assert cells == [2.0**53, None, None]
    assert extras == [None, {"x": 2**53 + 1}, {"x": 10**400}]


def test_integers_as_text() -> None:
    cells, extras = encode_one(integer_text_field("x"), 7, 2**70, -(2**70), "8", True, None)
    assert cells == ["7", str(2**70), str(-(2**70)), None, None, None]
    assert extras == [None, None, None, {"x": "8"}, {"x": True}, None]


def test_json_texts_hold_any_value() -> None:
    values = [*ANY_VALUE, 2**70, {"deep": [{"er": None}]}, "é"]
    cells, extras = encode_one(json_field("x"), *values)
    assert cells[0] is None
    assert [json.loads(cell) for cell in cells[1:]] == values[1:]
    assert extras == [None] * len(values)


def test_nan_is_a_missing_value_and_no_misfit() -> None:
    for field in (
        pa.field("x", pa.int64()),
        pa.field("x", pa.string()),
        pa.field("x", pa.float64()),
        json_field("x"),
    ):
        assert encode_one(field, math.nan) == ([None], [None])
    nested = pa.field("x", pa.struct([("a", pa.float64()), ("b", pa.list_(pa.int64()))]))
    cells, extras = encode_one(nested, {"a": math.nan, "b": [1, math.nan]})
    assert cells == [{"a": None, "b": [1, None]}]
    assert extras == [None]


def test_infinity_stays_where_a_float_can_hold_it() -> None:
    assert encode_one(pa.field("x", pa.float64()), math.inf) == ([math.inf], [None])
    assert encode_one(pa.field("x", pa.int64()), -math.inf) == ([None], [None])


def test_a_struct_takes_no_other_keys_and_misses_none() -> None:
    field = pa.field("x", pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    values = [{"b": 1, "a": 2}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": None, "b": 1}]
    cells, extras = encode_one(field, *values)
    assert cells == [values[0], None, None, values[3]]
    assert extras == [None, {"x": values[1]}, {"x": values[2]}, None]


def test_later_columns_go_to_the_extra_column() -> None:
    fields = [pa.field("a", pa.int64()), extra_field(["a"], later_columns=True)]
    cells, extras = encode(fields, {"a": 1, "new": 2**70, "n": None}, {}, {"a": "x", "new": [1]})
    assert cells == [1, None, None]
    assert extras == [f'{{"new":{2**70},"n":null}}', None, '{"a":"x","new":[1]}']


def test_columns_that_were_not_selected_do_not() -> None:
    fields = [pa.field("a", pa.int64()), extra_field(["a"], later_columns=False)]
    assert encode(fields, {"a": "x", "prompt": "p"}) == [[None], ['{"a":"x"}']]


def test_without_an_extra_column_a_misfit_is_just_null() -> None:
    assert encode([pa.field("a", pa.int64())], {"a": "x"}) == [[None]]


def test_names_of_own_columns_give_way() -> None:
    taken = ["Source_File", "cbatch_extra", "cbatch_source_file"]
    assert source_file_field(taken).name == "cbatch_cbatch_source_file"
    extra = extra_field(taken, later_columns=True)
    assert extra.name == "cbatch_cbatch_extra"
    fields = [pa.field("cbatch_extra", pa.string()), extra]
    assert encode(fields, {"cbatch_extra": "mine", "b": 1}) == [["mine"], ['{"b":1}']]


def test_source_file_and_unreadable_rows() -> None:
    fields = [
        pa.field("a", pa.int64()),
        source_file_field(["a"]),
        extra_field([], later_columns=True),
    ]
    rows = [Row(0, {"a": 1}, source_file="x"), Row(1, error=UNREADABLE, source_file="y")]
    arrays = ColumnEncoder(pa.schema(fields)).encode(rows)
    assert [array.to_pylist() for array in arrays] == [[1, None], ["x", "y"], [None, None]]


def test_no_rows() -> None:
    fields = [pa.field("a", pa.int64()), pa.field("b", pa.list_(pa.string()))]
    assert encode([*fields, extra_field(["a"], later_columns=True)]) == [[], [], []]


def test_arrow_rows_are_copied_in_any_order() -> None:
    schema = pa.schema([("a", pa.timestamp("ns")), ("b", pa.dictionary(pa.int32(), pa.string()))])
    batches = [
        pa.record_batch(
            [
                pa.array([start, None, start + 2], pa.timestamp("ns")),
                pa.array(names).dictionary_encode(),
            ],
            schema=schema,
        )
        for start, names in ((10**18 + 1, ["x", "y", "w"]), (5, ["z", None, "x"]))
    ]
    places = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (0, 2), (0, 0)]
    rows = [Row(i, arrow=ArrowRow(batches[b], offset, 8)) for i, (b, offset) in enumerate(places)]
    rows.insert(3, Row(9, error=UNREADABLE))
    stamps, names = ColumnEncoder(schema).encode(rows)
    integers = [10**18 + 1, None, 10**18 + 3, None, None, 7, 10**18 + 3, 10**18 + 1]
    assert stamps.equals(pa.array(integers, pa.timestamp("ns")))
    assert names.to_pylist() == ["x", "y", "w", None, None, "x", "w", "x"]
    only_unreadable = ColumnEncoder(schema).encode([Row(0, error=UNREADABLE)])
    assert [array.type for array in only_unreadable] == schema.types


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from("xyz"), json_values), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_no_value_is_lost_or_altered(rows: list[dict[str, Any]], num_observed: int) -> None:
    """Every cell, by the notes of its field, or the extra column gives back the value."""
    observer = ColumnObserver()
    for row in rows[:num_observed]:
        observer.observe(row)
    fields = [observer.field(name) for name in observer.column_names]
    fields.append(extra_field([], later_columns=True))
    columns = dict(zip([field.name for field in fields], encode(fields, *rows), strict=True))
    for index, row in enumerate(rows):
        extras = json.loads(columns["cbatch_extra"][index] or "{}")
        restored = dict(extras)
        for field in fields:
            cell = columns[field.name][index]
            if cell is None or note(field, EXTRA_KEY):
                continue
            assert field.name not in extras
            if note(field, JSON_KEY):
                cell = json.loads(cell)
            elif note(field, INTEGER_KEY):
                cell = int(cell)
            restored[field.name] = cell
        expected = {name: value for name, value in row.items() if not _says_nothing(value)}
        found = {name: value for name, value in restored.items() if not _says_nothing(value)}
        assert _plain(found) == _plain(expected)


def _says_nothing(value: Any) -> bool:
    return value is None or value in (math.inf, -math.inf)


def _plain(value: Any) -> Any:
    """For comparison: infinity inside of JSON texts is null, and true is not 1."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, bool):
        return str(value)
    return None if _says_nothing(value) else value
