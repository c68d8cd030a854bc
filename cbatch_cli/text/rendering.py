"""What a template renders to, and what is said when it fails. Runs in the render worker."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

TEMPLATE_FILE_NAME = "<template>"
_UNDEFINED_NAME = re.compile(r"'([^']+)' is undefined|has no attribute '([^']+)'")
_PROBE = "part of a message"
_PRINTED_PART = re.compile(rf"""['"]text['"]: ?['"]{_PROBE}""")


class NullValueError(Exception):
    """A template prints a value that is null in this row."""


class RowRenderer:
    """Renders the user's template over the columns of a row.

    Columns are variables; `row` is all of them, for names that are no identifiers. A column that
    is absent or null fails the row rather than put "None" into a prompt. Raises
    `jinja2.TemplateError` if the template does not compile.
    """

    def __init__(self, source: str) -> None:
        from jinja2 import StrictUndefined, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, finalize=_refuse_null
        )
        # Jinja's own tojson escapes <, > and & for HTML, which a prompt is not.
        environment.filters["tojson"] = _to_json
        self.source = source
        self._names = meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for one row. Raises whatever the template raises."""
        try:
            return str(self._template.render({"row": columns, **columns}))
        except NullValueError:
            names = sorted(n for n in self._names if n in columns and columns[n] is None)
            hint = f"; null in this row: {', '.join(map(repr, names))}" if names else ""
            raise NullValueError(f"the template prints a null value{hint}") from None


class ChatRenderer:
    """Renders messages as the tokenizer's `apply_chat_template` does, in the same sandbox.

    Raises `jinja2.TemplateError` if the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        self.source = source
        self._special_tokens = dict(special_tokens)
        # Rendering needs a tokenizer's method, not its vocabulary, which may be large.
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
        self._takes_parts = self._probe_parts()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of one conversation, ready for the model's turn."""
        if not self._takes_parts:
            messages = [_join_parts(message) for message in messages]
        return self._apply(messages)

    def _apply(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        )

    def _probe_parts(self) -> bool:
        """Whether the template reads content that is a list of parts.

        One that takes strings alone would print the list as Python writes it, without an error.
        """
        from jinja2 import TemplateSyntaxError

        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self._apply([{"role": "user", "content": parts}])
        except TemplateSyntaxError:
            raise
        except Exception:
            return False
        return _PROBE in text and not _PRINTED_PART.search(text)


def import_libraries(*, chat: bool) -> None:
    """Import what the renderers need, so that no template pays for it."""
    import jinja2.sandbox  # noqa: F401

    if chat:
        from transformers import PreTrainedTokenizerFast  # noqa: F401


def describe_error(error: Exception, source: str) -> str:
    """What went wrong in the template `source`, in words that hold no value of the row.

    Exceptions quote values, so of their text only what stands in the template itself is kept.
    """
    from jinja2 import TemplateError, UndefinedError

    if isinstance(error, NullValueError):
        return str(error)
    if isinstance(error, MemoryError):
        return "the template needs more memory than a row may use"
    line = _template_line(error)
    where = f" (line {line})" if line else ""
    if isinstance(error, UndefinedError):
        found = _UNDEFINED_NAME.search(str(error))
        name = next(filter(None, found.groups()), None) if found else None
        if name and name in source:
            return f"the template uses {name!r}, which this row does not have{where}"
    elif isinstance(error, TemplateError) and str(error) and str(error) in source:
        return f"the template refuses the row: {error}{where}"
    return f"the template failed with {type(error).__name__}{where}"


def describe_compile_error(error: Exception) -> str:
    """Why a template does not compile: nothing of a row is in it yet."""
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may use"
    line = getattr(error, "lineno", None)
    return f"line {line}: {error}" if line else f"{type(error).__name__}: {error}"


def _template_line(error: Exception) -> int | None:
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == TEMPLATE_FILE_NAME
    ]
    return lines[-1] if lines else None


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise NullValueError
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _join_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}
