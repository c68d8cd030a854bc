"""Which columns of the input a prompt is made from."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cbatch_cli.errors import UsageError

PromptKind = Literal["text", "messages", "instruction", "template", "openai"]

SAMPLING_COLUMN = "sampling_params"
"""The column that holds a row's own sampling options, whatever the prompt is made from."""

OPENAI_COLUMNS = ("custom_id", "method", "url", "body")
"""The keys of an OpenAI batch line."""

_KIND_BY_NAME: dict[str, PromptKind] = {
    "messages": "messages",
    "prompt": "text",
    "text": "text",
    "instruction": "instruction",
    "question": "text",
}
_MAX_NAMES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """How a prompt is made and from what.

    `column` is None where no single column is the prompt: `template` and `openai`.
    `input_column` belongs to `instruction` alone.
    """

    kind: PromptKind
    column: str | None = None
    input_column: str | None = None

    @property
    def columns_read(self) -> frozenset[str] | None:
        """Names of the columns needed to make a prompt; None means that any may be needed."""
        if self.kind == "template":
            return None
        names = {SAMPLING_COLUMN, *(OPENAI_COLUMNS if self.kind == "openai" else ())}
        names.update(name for name in (self.column, self.input_column) if name is not None)
        return frozenset(names)

    @property
    def text_columns(self) -> frozenset[str]:
        """Names of the columns that are plain text, and strings in the output for that reason."""
        if self.kind not in ("text", "instruction"):
            return frozenset()
        return frozenset(name for name in (self.column, self.input_column) if name is not None)


def choose_prompt_columns(
    column_names: Sequence[str],
    *,
    prompt_column: str | None,
    messages_column: str | None,
    has_template: bool,
    is_openai: bool,
) -> PromptColumns:
    """What was asked for, else the first of messages, prompt, text, instruction and question.

    `instruction` takes `input` with it where that column exists. Names are matched exactly.
    An input without a readable row has no columns; any named column is accepted for it.
    Raises `UsageError` naming the columns found when there is none to use.
    """
    if has_template:
        return PromptColumns("template")
    if prompt_column is not None:
        _require(prompt_column, column_names)
        return PromptColumns("text", prompt_column)
    if messages_column is not None:
        _require(messages_column, column_names)
        return PromptColumns("messages", messages_column)
    if is_openai:
        return PromptColumns("openai")
    for name, kind in _KIND_BY_NAME.items():
        if name in column_names:
            takes_input = kind == "instruction" and "input" in column_names
            return PromptColumns(kind, name, "input" if takes_input else None)
    known = ", ".join(_KIND_BY_NAME)
    raise UsageError(
        f"no column is named {known}; {describe_columns(column_names)}; "
        "choose with --prompt-column, --messages-column or --template"
    )


def describe_columns(column_names: Sequence[str]) -> str:
    """The names found, as a clause of an error message."""
    if not column_names:
        return "the input has no readable row"
    shown = ", ".join(map(repr, column_names[:_MAX_NAMES_SHOWN]))
    more = len(column_names) - _MAX_NAMES_SHOWN
    return f"the columns found are {shown}" + (f" and {more} more" if more > 0 else "")


def _require(name: str, column_names: Sequence[str]) -> None:
    if name in column_names or not column_names:
        return
    lower = {found.lower(): found for found in column_names}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ""
    raise UsageError(f"there is no column {name!r}; {describe_columns(column_names)}{hint}")
