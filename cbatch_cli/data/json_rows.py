"""One line of JSON to the columns of a row, and values back to JSON text."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from cbatch_cli.errors import RowErrorType, RowFailedError

MAX_NESTING = 200
"""Deepest nesting of a row. Whatever walks a row later, down to orjson's own limit of 254 levels
when it writes, can rely on it."""

_DIGITS_TO_ZERO = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER = b"0" * 19
_TYPE_NAMES = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def parse_object(line: bytes) -> dict[str, Any]:
    """The object that `line` holds; of a repeated key the last value counts.

    Integers keep all their digits. NaN, Infinity and numbers beyond a double become
    non-finite floats. Raises `RowFailedError`: `invalid_json` for what is not JSON, is not UTF-8,
    holds half a surrogate pair or is nested too deeply, `bad_type` for JSON that is no object.
    """
    # orjson silently turns an integer beyond 64 bits into a float, and 19 digits may be one.
    # Folding all digits into one and searching for a run of it is faster than a regex.
    if _LONG_NUMBER in line.translate(_DIGITS_TO_ZERO):
        value = _parse_slowly(line)
    else:
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            value = _parse_slowly(line)
    if type(value) is not dict:
        kind = _TYPE_NAMES.get(type(value), "a number")
        raise RowFailedError(RowErrorType.BAD_TYPE, f"the line holds {kind}, not an object")
    # Each level takes two brackets, so most lines are too short to need a look.
    if len(line) > 2 * MAX_NESTING and line.count(b"{") + line.count(b"[") > MAX_NESTING:
        _check_nesting(value)
    return value


def dump_value(value: Any) -> str:
    """`value`, which came from JSON, as compact JSON text; non-finite numbers become null."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        finite = _without_non_finite(value)
        return json.dumps(finite, ensure_ascii=False, separators=(",", ":"))


def _parse_slowly(line: bytes) -> Any:
    """Parse with the standard library: non-finite numbers, long integers, clear messages."""
    try:
        value = json.loads(line.decode("utf-8"))
        # The standard library lets half a surrogate pair pass, which no UTF-8 file can hold.
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except json.JSONDecodeError as error:
        message = f"{error.msg}: character {error.pos + 1}"
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start + 1}"
    except UnicodeEncodeError:
        message = "half a surrogate pair in a string"
    except RecursionError:
        message = f"nested more than {MAX_NESTING} levels deep"
    except ValueError:
        message = "an integer has too many digits"
    raise RowFailedError(RowErrorType.INVALID_JSON, message)


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise RowFailedError(RowErrorType.INVALID_JSON, f"nested more than {MAX_NESTING} levels deep")


def _without_non_finite(value: Any) -> Any:
    if type(value) is dict:
        return {name: _without_non_finite(entry) for name, entry in value.items()}
    if type(value) is list:
        return [_without_non_finite(entry) for entry in value]
    if type(value) is float and not math.isfinite(value):
        return None
    return value
