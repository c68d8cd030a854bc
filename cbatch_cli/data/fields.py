"""What a field of the passed-through schema says about itself beside its Arrow type.

The notes are field metadata, so they are stored with the output: a reader of the file can tell a
column of JSON texts from a column of plain strings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from cbatch_cli.data.prompt_columns import describe_columns
from cbatch_cli.errors import UsageError

JSON_KEY = b"cbatch.json"
"""Every value that is not null is a JSON text."""
INTEGER_KEY = b"cbatch.integer"
"""Every value that is not null is an integer in decimal digits, since 64 bits do not hold all."""
SOURCE_FILE_KEY = b"cbatch.source_file"
"""The column is ours and names the input file of a row."""
EXTRA_KEY = b"cbatch.extra"
"""The column is ours: a JSON object of values that have no place in the other columns."""

OWN_KEYS = (SOURCE_FILE_KEY, EXTRA_KEY)

EXTRA_MISFITS = b"misfits"
"""Value of `EXTRA_KEY`: only values of passed-through columns that do not fit their type."""
EXTRA_ALL = b"all"
"""Value of `EXTRA_KEY`: those, and columns that are not in the schema."""


def json_field(name: str) -> pa.Field[Any]:
    """A column of JSON texts."""
    return pa.field(name, pa.string(), metadata={JSON_KEY: b"1"})


def integer_text_field(name: str) -> pa.Field[Any]:
    """A column of integers of any size, as text."""
    return pa.field(name, pa.string(), metadata={INTEGER_KEY: b"1"})


def source_file_field(taken: Collection[str]) -> pa.Field[Any]:
    """The column that names the input file, called so that it does not clash with `taken`."""
    return pa.field(_free_name("source_file", taken), pa.string(), metadata={SOURCE_FILE_KEY: b"1"})


def extra_field(taken: Collection[str], *, later_columns: bool) -> pa.Field[Any]:
    """The column `cbatch_extra`, named so that it does not clash with `taken`.

    `later_columns` says whether columns that are not in the schema go there as well.
    """
    content = EXTRA_ALL if later_columns else EXTRA_MISFITS
    return pa.field(_free_name("cbatch_extra", taken), pa.string(), metadata={EXTRA_KEY: content})


def note(field: pa.Field[Any], key: bytes) -> bytes | None:
    """What the field's metadata has under `key`; None if nothing."""
    value: bytes | None = (field.metadata or {}).get(key)
    return value


def select_columns(option: str, column_names: Sequence[str]) -> tuple[str, ...]:
    """The columns to pass through, in input order: `all`, `none`, or names between commas.

    Raises `UsageError` for a name that is not there, naming the columns found.
    """
    if option == "all":
        return tuple(column_names)
    if option == "none":
        return ()
    wanted = {name.strip() for name in option.split(",")}
    for name in sorted(wanted):
        if name not in column_names:
            raise UsageError(
                f"cannot pass column {name!r} through; {describe_columns(column_names)}"
            )
    return tuple(name for name in column_names if name in wanted)


def _free_name(name: str, taken: Collection[str]) -> str:
    taken = {other.lower() for other in taken}
    while name.lower() in taken:
        name = f"cbatch_{name}"
    return name
