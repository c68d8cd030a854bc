"""Values of passed-through columns to Arrow arrays of the schema that was fixed before row 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from cbatch_cli.data.column_types import INT64_MAX, INT64_MIN, MAX_EXACT_FLOAT, kind_of
from cbatch_cli.data.fields import (
    EXTRA_ALL,
    EXTRA_KEY,
    INTEGER_KEY,
    JSON_KEY,
    SOURCE_FILE_KEY,
    note,
)
from cbatch_cli.data.json_rows import dump_value
from cbatch_cli.data.row import ArrowRow, Row

Convert = Callable[[Any], Any]
"""A JSON value to what `pa.array` takes for a type; raises `_Misfit` where that would lose it."""


class _Misfit(Exception):
    """The value cannot be held by the type of its column."""


class ColumnEncoder:
    """Encodes the passed-through columns of rows to the fields of `schema`, as a source made it.

    Null, NaN, a missing column and a row that could not be read give a null cell. A value that
    does not fit gives a null cell too and is kept in the column `cbatch_extra`, where the schema
    has one. Columns of a Parquet row are copied as they are.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._converters = {field.name: _converter(field) for field in schema if _is_input(field)}
        extra = next((field for field in schema if note(field, EXTRA_KEY)), None)
        self._keeps_misfits = extra is not None
        self._keeps_others = extra is not None and note(extra, EXTRA_KEY) == EXTRA_ALL

    def encode(self, rows: Sequence[Row]) -> list[pa.Array[Any]]:
        """One array for each field of the schema, with one value for each row."""
        misfits: list[dict[str, Any]] = [{} for _ in rows]
        arrays = {
            field.name: self._encode_field(field, rows, misfits)
            for field in self._schema
            if not note(field, EXTRA_KEY)
        }
        if self._keeps_others:
            for row, extra in zip(rows, misfits, strict=True):
                others = row.columns.keys() - self._converters.keys()
                extra.update({name: row.columns[name] for name in row.columns if name in others})
        texts = [dump_value(extra) if extra else None for extra in misfits]
        return [
            arrays[field.name] if field.name in arrays else pa.array(texts, pa.string())
            for field in self._schema
        ]

    def _encode_field(
        self, field: pa.Field[Any], rows: Sequence[Row], misfits: list[dict[str, Any]]
    ) -> pa.Array[Any]:
        if note(field, SOURCE_FILE_KEY):
            return pa.array([row.source_file for row in rows], pa.string())
        if any(row.arrow is not None for row in rows):
            return _copy(field, rows)
        name = field.name
        convert = self._converters[name]
        values = [row.columns.get(name) for row in rows]
        if all(value is None for value in values):
            return _nulls(len(values), field)
        if convert is _to_text and set(map(type, values)) <= {str, type(None)}:
            return _to_array(values, field)
        for position, value in enumerate(values):
            if value is None:
                continue
            try:
                values[position] = convert(value)
            except _Misfit:
                values[position] = None
                if self._keeps_misfits:
                    misfits[position][name] = value
        return _to_array(values, field)


def _is_input(field: pa.Field[Any]) -> bool:
    return not note(field, SOURCE_FILE_KEY) and not note(field, EXTRA_KEY)


def _nulls(length: int, field: pa.Field[Any]) -> pa.Array[Any]:
    array: pa.Array[Any] = pa.nulls(length, field.type)
    return array


def _to_array(values: Sequence[Any], field: pa.Field[Any]) -> pa.Array[Any]:
    array: pa.Array[Any] = pa.array(values, field.type)
    return array


def _copy(field: pa.Field[Any], rows: Sequence[Row]) -> pa.Array[Any]:
    """The column out of the record batches that rows point to, neighbours in one slice."""
    slices = []
    start = 0
    while start < len(rows):
        first = rows[start].arrow
        stop = start + 1
        while stop < len(rows) and _continues(rows[stop].arrow, first, stop - start):
            stop += 1
        if first is None:
            slices.append(_nulls(stop - start, field))
        else:
            source = first.batch.column(field.name)
            slices.append(source.slice(first.offset, stop - start))
        start = stop
    column: pa.Array[Any] = pa.concat_arrays(slices)
    return column


def _continues(arrow: ArrowRow | None, first: ArrowRow | None, distance: int) -> bool:
    if arrow is None or first is None:
        return arrow is first
    return arrow.batch is first.batch and arrow.offset == first.offset + distance


def _converter(field: pa.Field[Any]) -> Convert:
    if note(field, JSON_KEY):
        return _to_json
    if note(field, INTEGER_KEY):
        return _to_integer_text
    return _type_converter(field.type)


def _type_converter(data_type: pa.DataType) -> Convert:
    if pa.types.is_list(data_type):
        return _list_converter(_type_converter(data_type.value_type))
    if pa.types.is_struct(data_type):
        return _struct_converter({field.name: _type_converter(field.type) for field in data_type})
    return _SCALARS.get(data_type, _null)


def _list_converter(convert: Convert) -> Convert:
    def to_list(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not list:
            raise _Misfit
        return [convert(entry) for entry in value]

    return to_list


def _struct_converter(converters: dict[str, Convert]) -> Convert:
    def to_struct(value: Any) -> Any:
        if value is None:
            return None
        # Arrow would drop a key it does not know and make up a null for one that is missing.
        if type(value) is not dict or value.keys() != converters.keys():
            raise _Misfit
        return {name: convert(value[name]) for name, convert in converters.items()}

    return to_struct


def _to_text(value: Any) -> Any:
    return value if type(value) is str else _null(value)


def _to_boolean(value: Any) -> Any:
    return value if type(value) is bool else _null(value)


def _to_integer(value: Any) -> Any:
    is_int64 = type(value) is int and INT64_MIN <= value <= INT64_MAX
    return value if is_int64 else _null(value)


def _to_float(value: Any) -> Any:
    if type(value) is int:
        if abs(value) > MAX_EXACT_FLOAT:
            raise _Misfit
        return float(value)
    return value if type(value) is float and not math.isnan(value) else _null(value)


def _to_integer_text(value: Any) -> Any:
    return str(value) if type(value) is int else _null(value)


def _to_json(value: Any) -> Any:
    return None if kind_of(value) is None else dump_value(value)


def _null(value: Any) -> None:
    """Null for a value that says nothing (null, NaN, infinity); any other is a misfit."""
    if kind_of(value) is not None:
        raise _Misfit


_SCALARS: dict[pa.DataType, Convert] = {
    pa.string(): _to_text,
    pa.bool_(): _to_boolean,
    pa.int64(): _to_integer,
    pa.float64(): _to_float,
}
