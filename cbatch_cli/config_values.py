"""Turning what a flag, a variable or a TOML file holds into the type a setting has."""

from __future__ import annotations

import json
import os
import re
import types
import typing
from typing import Annotated, Any, Literal

ByteCount = Annotated[int, "bytes"]
"""A number of bytes, which may be written as `4GiB` or `512MB`."""

_BOOLS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLS |= {"0": False, "false": False, "no": False, "off": False}


def kind_of(hint: Any) -> Any:
    """The type a setting has when it is given: `hint` without `| None`."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)


def parse_text(kind: Any, text: str) -> Any:
    """The value that `text` from the environment stands for; `text` itself where it is none.

    A list is written in JSON; anything else stands for a list of one.
    """
    if kind is bool:
        return _BOOLS.get(text.lower(), text)
    is_list = typing.get_origin(kind) is tuple
    if kind in (int, float) or kind == tuple[int, ...] or (is_list and text.startswith("[")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def parse_bytes(text: str) -> int:
    """The number of bytes that `4GiB`, `512MB`, `1.5 GiB` or `1048576` stands for.

    Powers of 1024 with an `i`, of 1000 without. Raises `ValueError`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?))?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size in bytes")
    power = "kmgt".index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def convert(kind: Any, value: Any) -> Any:
    """`value` as a `kind`, without a conversion that could lose something.

    Raises `ValueError` whose text says what was expected.
    """
    try:
        if typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            items = value if isinstance(value, list | tuple) else [value]
            return tuple(_plain(item, entry) for entry in items)
        if kind == ByteCount:
            return parse_bytes(value) if isinstance(value, str) else _plain(int, value)
        return _plain(str if typing.get_origin(kind) is Literal else kind, value)
    except ValueError:
        raise ValueError(_expected(kind)) from None


def _plain(kind: type, value: Any) -> Any:
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError
    return value


def _expected(kind: Any) -> str:
    if kind == ByteCount:
        return "a size such as 4GiB, 512MB or a number of bytes"
    if typing.get_origin(kind) is tuple:
        return "a list of " + ("integers" if typing.get_args(kind)[0] is int else "strings")
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]
