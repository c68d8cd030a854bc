"""Typing the columns of JSON rows from the first rows of the input.

A column takes the commonest type of its values; integers and floats count as one type. It is a
JSON text instead where more than a tenth of its values would not fit, where its lists or objects
do not all have one shape, or where a float could not hold its integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cbatch_cli.data.fields import integer_text_field, json_field

MAX_COLUMNS = 1024
"""Names beyond these, in order of appearance, count as columns that appear later."""
MAX_TYPED_NESTING = 8
"""Deeper lists and objects are kept as JSON texts."""

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_EXACT_FLOAT = 2**53
"""Every integer up to this size is a double."""


@dataclass(frozen=True, slots=True)
class _List:
    """The shape of lists whose items have one shape."""

    item: Shape


@dataclass(frozen=True, slots=True)
class _Struct:
    """The shape of objects with the same keys."""

    fields: dict[str, Shape]


Shape = str | _List | _Struct
"""How a value is made: a name in `_SCALARS`, `unknown` for null, or of other shapes."""

_SCALARS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),  # inside lists and objects: an integer that a float may not hold
    "float": pa.float64(),
    "string": pa.string(),
}


class _NoCommonShape(Exception):
    """Two values cannot be held by one Arrow type without loss."""


class ColumnObserver:
    """Learns the columns of an input from its first rows."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names in order of first appearance."""
        return tuple(self._columns)

    def observe(self, values: Mapping[str, Any]) -> None:
        """Take the values of one row into account."""
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) == MAX_COLUMNS:
                    continue
                column = self._columns[name] = _Column()
            column.observe(value)

    def field(self, name: str) -> pa.Field[Any]:
        """The Arrow field for the column `name`."""
        return self._columns[name].field(name)


class _Column:
    """What is known of one column."""

    def __init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._shape: Shape | None = "unknown"
        """The shape of all lists and objects, None if they have none in common."""
        self._largest_integer = 0
        self._exceeds_int64 = False

    def observe(self, value: Any) -> None:
        kind = kind_of(value)
        if kind is None:
            return
        self._kinds[kind] += 1
        if kind == "int":
            self._largest_integer = max(self._largest_integer, abs(value))
            self._exceeds_int64 |= not INT64_MIN <= value <= INT64_MAX
        elif kind in ("list", "struct") and self._shape is not None:
            try:
                self._shape = _merge(self._shape, _shape_of(value))
            except _NoCommonShape:
                self._shape = None

    def field(self, name: str) -> pa.Field[Any]:
        counts = dict(self._kinds)
        num_values = sum(counts.values())
        if not num_values:
            return pa.field(name, pa.string())
        num_floats = counts.pop("float", 0)
        if num_floats:
            counts["number"] = num_floats + counts.pop("int", 0)
        kind = max(counts, key=lambda kind: counts[kind])
        if (num_values - counts[kind]) * 10 > num_values:
            return json_field(name)
        if kind in ("list", "struct"):
            data_type = _arrow_type(self._shape)
            return json_field(name) if data_type is None else pa.field(name, data_type)
        if kind == "number":
            is_exact = self._largest_integer <= MAX_EXACT_FLOAT
            return pa.field(name, pa.float64()) if is_exact else json_field(name)
        if kind == "int" and self._exceeds_int64:
            return integer_text_field(name)
        return pa.field(name, _SCALARS[kind])


def kind_of(value: Any) -> str | None:
    """The type name of a JSON value; None where it says nothing: null, NaN, infinity."""
    kind = _KINDS[type(value)]
    if kind == "float" and not math.isfinite(value):
        return None
    return kind


_KINDS: dict[type, str | None] = {
    type(None): None,
    bool: "bool",
    int: "int",
    float: "float",
    str: "string",
    list: "list",
    dict: "struct",
}


def _shape_of(value: Any, depth: int = 1) -> Shape:
    kind = kind_of(value)
    if kind is None:
        return "unknown"
    if kind == "int" and abs(value) > MAX_EXACT_FLOAT:
        if INT64_MIN <= value <= INT64_MAX:
            return "long"
        raise _NoCommonShape
    if kind not in ("list", "struct"):
        return kind
    if depth > MAX_TYPED_NESTING:
        raise _NoCommonShape
    if kind == "struct":
        return _Struct({name: _shape_of(entry, depth + 1) for name, entry in value.items()})
    shape: Shape = "unknown"
    for entry in value:
        shape = _merge(shape, _shape_of(entry, depth + 1))
    return _List(shape)


def _merge(first: Shape, second: Shape) -> Shape:
    """The shape that holds values of both. Raises `_NoCommonShape`."""
    if first == second or second == "unknown":
        return first
    if first == "unknown":
        return second
    if isinstance(first, _List) and isinstance(second, _List):
        return _List(_merge(first.item, second.item))
    if isinstance(first, _Struct) and isinstance(second, _Struct):
        if first.fields.keys() == second.fields.keys():
            others = second.fields
            return _Struct({name: _merge(one, others[name]) for name, one in first.fields.items()})
    elif isinstance(first, str) and isinstance(second, str):
        if {first, second} == {"int", "float"}:
            return "float"
        if {first, second} == {"int", "long"}:
            return "long"
    raise _NoCommonShape


def _arrow_type(shape: Shape | None) -> pa.DataType | None:
    """The Arrow type of a shape; None where a part of it is unknown."""
    if isinstance(shape, _List):
        item = _arrow_type(shape.item)
        return None if item is None else pa.list_(item)
    if not isinstance(shape, _Struct):
        return _SCALARS.get(shape or "unknown")
    fields = []
    for name, inner in shape.fields.items():
        data_type = _arrow_type(inner)
        if data_type is None:
            return None
        fields.append(pa.field(name, data_type))
    # Parquet has no struct without fields.
    return pa.struct(fields) if fields else None
