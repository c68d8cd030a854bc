"""What a row holds for the engine: its prompt and its own sampling options, checked.

Error messages name columns and types, never what a column says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cbatch_cli.data.openai_batch import read_batch_line
from cbatch_cli.data.prompt_columns import SAMPLING_COLUMN, PromptColumns
from cbatch_cli.errors import RowErrorType, RowFailedError
from cbatch_cli.text.messages import Message, parse_messages, type_name


def read_prompt(
    columns: Mapping[str, Any], prompt: PromptColumns
) -> tuple[str | list[Message] | None, Mapping[str, Any]]:
    """The plain prompt or the conversation of a row, and its own sampling options.

    The prompt is None where a template is yet to make it. Raises `RowFailedError`.
    """
    if prompt.kind == "openai":
        request = read_batch_line(columns)
        if request.messages is not None:
            return parse_messages(request.messages, "messages"), request.sampling
        return require_text(request.prompt, "prompt"), request.sampling
    return _read_columns(columns, prompt), _read_sampling(columns.get(SAMPLING_COLUMN))


def require_text(value: Any, column: str) -> str:
    """`value` if it is a string that is not empty. Raises `RowFailedError`."""
    if value is None:
        raise RowFailedError(RowErrorType.MISSING_PROMPT, f"{column!r} is missing or null")
    if not isinstance(value, str):
        message = f"{column!r} must be a string, not {type_name(value)}"
        raise RowFailedError(RowErrorType.BAD_TYPE, message)
    if not value:
        raise RowFailedError(RowErrorType.EMPTY_PROMPT, f"{column!r} is empty")
    return value


def _read_columns(columns: Mapping[str, Any], prompt: PromptColumns) -> str | list[Message] | None:
    if prompt.column is None:
        return None
    value = columns.get(prompt.column)
    if prompt.kind == "messages":
        if value is None:
            message = f"{prompt.column!r} is missing or null"
            raise RowFailedError(RowErrorType.MISSING_PROMPT, message)
        return parse_messages(value, prompt.column)
    text = require_text(value, prompt.column)
    if prompt.input_column is not None and columns.get(prompt.input_column) not in (None, ""):
        return f"{text}\n\n{require_text(columns[prompt.input_column], prompt.input_column)}"
    return text


def _read_sampling(value: Any) -> Mapping[str, Any]:
    """The sampling options in a column that holds an object or its JSON text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}  # CSV has nothing but an empty cell for what is not there
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            message = f"{SAMPLING_COLUMN!r} is a string that is not JSON"
            raise RowFailedError(RowErrorType.INVALID_OPTION, message) from None
    if not isinstance(value, Mapping):
        message = f"{SAMPLING_COLUMN!r} must be an object, not {type_name(value)}"
        raise RowFailedError(RowErrorType.INVALID_OPTION, message)
    return value
