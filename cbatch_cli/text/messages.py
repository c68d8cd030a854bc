"""Conversations as rows hold them, checked before a chat template sees them.

Error messages name columns, positions and types, never what a message says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cbatch_cli.errors import RowErrorType, RowFailedError

Message = dict[str, Any]

_SYSTEM_ROLES = frozenset({"system", "developer"})


def parse_messages(value: Any, column: str) -> list[Message]:
    """A conversation from a list of messages or from its JSON text, as Parquet may hold it.

    A message is `{"role": ..., "content": ...}`; other keys reach the template untouched. Content
    is a string or a list of text parts, and may be absent where something else, such as
    `tool_calls`, stands in for it. Raises `RowFailedError`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _bad_type(f"{column!r} is a string that is not JSON") from None
    if not isinstance(value, list | tuple):
        raise _bad_type(f"{column!r} must be a list of messages, not {type_name(value)}")
    if not value:
        raise RowFailedError(RowErrorType.EMPTY_PROMPT, f"{column!r} holds no message")
    messages = [_check_message(message, f"{column}[{i}]") for i, message in enumerate(value)]
    if not any(
        message.keys() - {"role", "name", "content"} or _has_text(message) for message in messages
    ):
        raise RowFailedError(RowErrorType.EMPTY_PROMPT, f"no message in {column!r} has content")
    return messages


def user_message(text: str) -> list[Message]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """`messages` under the system message `system`, unless they have their own."""
    if not system or any(message["role"] in _SYSTEM_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def type_name(value: Any) -> str:
    """The type of a value in the words of JSON, where JSON has it."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return names.get(type(value), type(value).__name__)


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _bad_type(f"{where} must be an object, not {type_name(message)}")
    # A struct column has every key in every message, null where a message lacks it.
    present = {key: value for key, value in message.items() if value is not None}
    role = present.get("role")
    if not isinstance(role, str) or not role:
        raise _bad_type(f"{where}.role must be a non-empty string")
    content = present.get("content")
    if isinstance(content, list | tuple):
        present["content"] = [
            _check_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)
        ]
    elif content is None:
        if not present.keys() - {"role", "name"}:
            raise _bad_type(f"{where} has no content")
    elif not isinstance(content, str):
        raise _bad_type(f"{where}.content must be a string, not {type_name(content)}")
    return present


def _check_part(part: Any, where: str) -> dict[str, Any]:
    """A text part. Others would vanish in the template of a model that reads text alone."""
    if not isinstance(part, Mapping):
        raise _bad_type(f"{where} must be an object, not {type_name(part)}")
    if part.get("type", "text") != "text":
        message = f"{where} is not a text part; others are not supported"
        raise RowFailedError(RowErrorType.UNSUPPORTED_OPTION, message)
    if not isinstance(part.get("text"), str):
        raise _bad_type(f"{where}.text must be a string, not {type_name(part.get('text'))}")
    return {"type": "text", **{key: value for key, value in part.items() if value is not None}}


def _has_text(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(part["text"] for part in content)
    return bool(content)


def _bad_type(message: str) -> RowFailedError:
    return RowFailedError(RowErrorType.BAD_TYPE, message)
