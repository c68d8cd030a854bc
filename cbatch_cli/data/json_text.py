"""JSON for files that must be written whatever the values are."""

from __future__ import annotations

import json
from typing import Any

import orjson


def dump_json(value: Any) -> bytes:
    """`value` as UTF-8 JSON. NaN becomes null; a type JSON does not know becomes its `str`."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        # File names that are not UTF-8 hold lone surrogates, integers may exceed 64 bits.
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(plain).encode()


def valid_unicode(text: str) -> str:
    """`text` with each lone surrogate, which no UTF-8 file can hold, replaced by a `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")
