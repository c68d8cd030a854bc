"""Values of Arrow arrays: as Python values, as hashes, and in types that can be stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from cbatch_cli.data.lines import content_hash


def to_python(column: pa.Array[Any]) -> list[Any]:
    """The values as Python values; a map as a dict, in which the last of equal keys counts.

    Times that Python cannot hold are given as text: those in nanoseconds, and all of a column
    with one after the year 9999.
    """
    try:
        values = _cast(column, _text_for_nanoseconds(column.type)).to_pylist()
    except (ValueError, OverflowError):
        values = _cast(column, _text_for_times(column.type)).to_pylist()
    if pt.is_map(column.type):
        return [value if value is None else dict(value) for value in values]
    return values


def content_hashes(batch: pa.RecordBatch) -> list[bytes]:
    """A hash of each row's values, the same however the rows are laid out and compressed."""
    columns = [_cast(column, _canonical_type(column.type)).to_pylist() for column in batch.columns]
    # ascii() is exact for every value that can occur here and the same in every Python.
    return [content_hash(ascii(values).encode()) for values in zip(*columns, strict=True)]


def storable_type(data_type: pa.DataType) -> pa.DataType:
    """The type itself, or the nearest one that rows of many batches can be gathered in.

    Views become plain strings and bytes; dictionaries get an index that has room for the values
    of all batches.
    """
    if pt.is_string_view(data_type):
        return pa.large_string()
    if pt.is_binary_view(data_type):
        return pa.large_binary()
    if pt.is_dictionary(data_type) and data_type.index_type.bit_width < 32:
        return pa.dictionary(pa.int32(), data_type.value_type, data_type.ordered)
    return _rebuild(data_type, storable_type)


def _cast(column: pa.Array[Any], data_type: pa.DataType) -> pa.Array[Any]:
    return column if column.type == data_type else column.cast(data_type)


def _canonical_type(data_type: pa.DataType) -> pa.DataType:
    """A type that holds the same values and that Python reads without loss."""
    if pt.is_dictionary(data_type):
        return _canonical_type(data_type.value_type)
    if pt.is_temporal(data_type):
        return pa.int32() if data_type.bit_width == 32 else pa.int64()
    # Text may be no UTF-8, and is hashed all the same.
    if pt.is_string(data_type) or pt.is_string_view(data_type):
        return pa.binary()
    if pt.is_large_string(data_type):
        return pa.large_binary()
    return _rebuild(data_type, _canonical_type)


def _text_for_nanoseconds(data_type: pa.DataType) -> pa.DataType:
    if getattr(data_type, "unit", None) == "ns":
        return _text_for_times(data_type)
    return _rebuild(data_type, _text_for_nanoseconds)


def _text_for_times(data_type: pa.DataType) -> pa.DataType:
    if pt.is_duration(data_type):
        return pa.int64()  # of which Arrow makes no text
    return pa.string() if pt.is_temporal(data_type) else _rebuild(data_type, _text_for_times)


def _rebuild(data_type: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The same type with `change` applied to the types it is made of."""
    rebuilt: pa.DataType = data_type
    if pt.is_struct(data_type):
        rebuilt = pa.struct([_changed(field, change) for field in data_type])
    elif pt.is_map(data_type):
        rebuilt = pa.map_(change(data_type.key_type), change(data_type.item_type))
    elif pt.is_list(data_type):
        rebuilt = pa.list_(_changed(data_type.value_field, change))
    elif pt.is_large_list(data_type):
        rebuilt = pa.large_list(_changed(data_type.value_field, change))
    elif pt.is_fixed_size_list(data_type):
        rebuilt = pa.list_(_changed(data_type.value_field, change), data_type.list_size)
    # A type that is the same keeps what a rebuilt one may not have, such as names inside maps.
    return data_type if rebuilt == data_type else rebuilt


def _changed(field: pa.Field[Any], change: Callable[[pa.DataType], pa.DataType]) -> pa.Field[Any]:
    return field.with_type(change(field.type))
