"""Where an answer and the one made now part, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cbatch_cli.data.row import RowResult
from cbatch_cli.errors import UsageError
from cbatch_cli.request import RequestOutput
from cbatch_cli.verify_prompts import BY_HAND

_NUM_CHARACTERS_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a row and the one made now first differ.

    `was` and `now` are a token's id, a piece of text, or a finish reason, None behind the end of
    the ids; where the row fails now, `now` is the message of the error. `position` counts tokens
    or characters, and is 0 where neither is compared.
    """

    row_index: int
    field: Literal["token_ids", "completion", "finish_reason", "error"]
    position: int = 0
    was: int | str | None
    now: int | str | None


def find_difference(was: RowResult, now: RequestOutput) -> Difference | None:
    """Where the answers part; None if they do not. Raises `UsageError` for another prompt."""
    row = was.row_index
    if now.error is not None:
        return Difference(row_index=row, field="error", was=None, now=now.error.message)
    if was.metrics.prompt_tokens != now.metrics.prompt_tokens:
        raise UsageError(
            f"the prompt of row {row} had {was.metrics.prompt_tokens} tokens and has "
            f"{now.metrics.prompt_tokens} now, so it is another prompt or tokenizer; {BY_HAND}"
        )
    if was.token_ids is not None and was.token_ids != now.token_ids:
        position = _first_difference(was.token_ids, now.token_ids)
        return Difference(
            row_index=row,
            field="token_ids",
            position=position,
            was=_item(was.token_ids, position),
            now=_item(now.token_ids, position),
        )
    # An answer is no null, for rows without one were not drawn.
    text, new_text = was.completion or "", now.text or ""
    if text != new_text:
        position = _first_difference(text, new_text)
        end = position + _NUM_CHARACTERS_SHOWN
        return Difference(
            row_index=row,
            field="completion",
            position=position,
            was=text[position:end],
            now=new_text[position:end],
        )
    reason, new_reason = was.finish_reason.value, now.finish_reason.value
    if reason != new_reason:
        return Difference(row_index=row, field="finish_reason", was=reason, now=new_reason)
    return None


def verify_text(result: Mapping[str, Any]) -> str:
    """A few lines that say which rows differ, and where first.

    `result` is what `verify_output` returns.
    """
    failed = result["rows_failed"]
    lines = [
        f"{result['output']}: {result['compared']} of {result['rows_compared']} of "
        f"{result['rows']:,} rows compared, {result['rows_equal']} equal, "
        f"{result['rows_different']} different"
        + (f"; {failed:,} rows with an error were left out" if failed else "")
    ]
    lines += map(_difference_text, result["differences"])
    return "\n".join([*lines, ""])


def _difference_text(difference: Mapping[str, Any]) -> str:
    row, was, now = difference["row_index"], difference["was"], difference["now"]
    if difference["field"] == "error":
        return f"row {row} has an answer in the output, and fails now: {now}"
    if difference["field"] == "finish_reason":
        return f"row {row} has the finish_reason {was!r} in the output, {now!r} now"
    unit = "token" if difference["field"] == "token_ids" else "character"
    return (
        f"row {row} differs from {unit} {difference['position']} on: {_shown(was)} in the output, "
        f"{_shown(now)} now"
    )


def _shown(value: int | str | None) -> str:
    return "the end" if value in (None, "") else repr(value)


def _item(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))
