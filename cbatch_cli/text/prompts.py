"""Rows to token ids: whatever a row says its prompt is, checked, rendered and tokenized."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cbatch_cli.errors import RowError, RowErrorType, RowFailedError, UsageError
from cbatch_cli.request import SamplingParams, check_length
from cbatch_cli.text.length import check_characters, max_characters_per_token
from cbatch_cli.text.messages import Message, user_message, with_system
from cbatch_cli.text.row_prompt import read_prompt
from cbatch_cli.text.templates import TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cbatch_cli.data.prompt_columns import PromptColumns
    from cbatch_cli.data.row import Row

_LONG_TEXT = 2**16
"""Characters beyond which a text is judged by their number before it is tokenized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """One row ready for the engine: its ids, special tokens included, and how to sample."""

    token_ids: tuple[int, ...]
    params: SamplingParams


class PromptEncoder:
    """Turns rows into prompts, a batch at a time, on one thread.

    `template` is the text of the user's template, for prompts of that kind. `chat` wraps a plain
    prompt as one user message. `system` goes before a conversation that has no system message, or
    before a plain prompt. A row's own sampling options override `defaults`. With `max_model_len`
    and `kv_capacity_tokens`, a prompt too long for either becomes a row error.

    Raises `UsageError` if a template does not compile, or if conversations are asked for and the
    model has no chat template or `chat` is False. `close` ends the process that runs templates.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt: PromptColumns,
        template: str | None = None,
        system: str | None = None,
        chat: bool | None = None,
        defaults: SamplingParams,
        max_model_len: int | None = None,
        kv_capacity_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._system = system
        self._chat = chat
        self._defaults = defaults
        self._limits: tuple[int, int] | None = None
        if max_model_len is not None and kv_capacity_tokens is not None:
            self._limits = (max_model_len, kv_capacity_tokens)
        self._special_ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self._has_chat_template = self._check_chat()
        self._renderer = self._start_renderer(template)

    def encode(self, rows: Sequence[Row]) -> list[EncodedPrompt | RowError]:
        """A prompt or an error for each row, in order; a bad row never spoils its neighbours."""
        drafts = [self._read(row) for row in rows]
        self._render_template(drafts)
        for draft in _good(drafts):
            self._shape(draft)
        self._render_chats(drafts)
        for draft in _good(drafts):
            self._check_characters(draft)
        for is_chat in (False, True):
            self._tokenize([draft for draft in _good(drafts) if draft.is_chat is is_chat])
        for draft in _good(drafts):
            self._check_tokens(draft)
        return [
            draft.error or EncodedPrompt(token_ids=draft.token_ids, params=draft.params)
            for draft in drafts
        ]

    def close(self) -> None:
        """End the process that runs templates, if there is one."""
        if self._renderer is not None:
            self._renderer.close()

    def _check_chat(self) -> bool:
        """Whether there is a chat template. Raises `UsageError` where one is needed and absent."""
        if self._prompt.kind == "messages" and self._chat is False:
            raise UsageError(
                f"column {self._prompt.column!r} holds conversations, which --no-chat excludes"
            )
        if getattr(self._tokenizer, "chat_template", None) is not None:
            return True
        if self._prompt.kind == "messages" or self._chat:
            raise UsageError("the model has no chat template, so it takes plain prompts only")
        return False

    def _start_renderer(self, template: str | None) -> TemplateRenderer | None:
        wants_chat = self._prompt.kind in ("messages", "openai") or self._chat
        chat_template = None
        if wants_chat and self._has_chat_template:
            try:
                chat_template = self._tokenizer.get_chat_template()
            except ValueError as error:  # several templates, none of them the default
                raise UsageError(str(error)) from None
        row_template = template if self._prompt.kind == "template" else None
        if row_template is None and chat_template is None:
            return None
        return TemplateRenderer(
            row_template=row_template,
            chat_template=chat_template,
            special_tokens=self._tokenizer.special_tokens_map,
        )

    def _read(self, row: Row) -> _Draft:
        draft = _Draft(row=row, params=self._defaults, error=row.error)
        if draft.error is None:
            try:
                prompt, sampling = read_prompt(row.columns, self._prompt)
                draft.params = self._with_special_stops(self._defaults.override(sampling))
            except RowFailedError as failure:
                draft.error = failure.error
            else:
                if isinstance(prompt, str):
                    draft.text = prompt
                elif prompt is not None:
                    draft.messages = prompt
        return draft

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """Stop at the id of a stop string that is a special token: no text ever shows it."""
        token_ids = [self._special_ids[s] for s in params.stop if s in self._special_ids]
        if not token_ids:
            return params
        merged = dict.fromkeys([*params.stop_token_ids, *token_ids])
        return dataclasses.replace(params, stop_token_ids=tuple(merged))

    def _render_template(self, drafts: Sequence[_Draft]) -> None:
        if self._prompt.kind != "template" or self._renderer is None:
            return
        good = _good(drafts)
        columns = [draft.row.columns for draft in good]
        for draft, text in zip(good, self._renderer.render_rows(columns), strict=True):
            draft.take(text)

    def _shape(self, draft: _Draft) -> None:
        """Decide between a plain prompt and a conversation, and put the system text before it."""
        if self._chat and not draft.is_chat:
            draft.messages = user_message(draft.text)
        if not draft.is_chat:
            if self._system:
                draft.text = f"{self._system}\n\n{draft.text}"
        elif self._chat is False:
            draft.fail(RowErrorType.UNSUPPORTED_OPTION, "--no-chat excludes conversations")
        elif not self._has_chat_template:
            message = "the model has no chat template for a conversation"
            draft.fail(RowErrorType.UNSUPPORTED_OPTION, message)
        else:
            draft.messages = with_system(draft.messages, self._system)

    def _render_chats(self, drafts: Sequence[_Draft]) -> None:
        chats = [draft for draft in _good(drafts) if draft.is_chat]
        if self._renderer is None or not chats:
            return
        texts = self._renderer.render_chats([draft.messages for draft in chats])
        for draft, text in zip(chats, texts, strict=True):
            draft.take(text)

    def _check_characters(self, draft: _Draft) -> None:
        if self._limits is None or len(draft.text) < _LONG_TEXT:
            return
        if self._max_characters_per_token is not None:
            draft.error = check_characters(
                len(draft.text), self._max_characters_per_token, *self._limits
            )

    @functools.cached_property
    def _max_characters_per_token(self) -> int | None:
        # Going through a large vocabulary takes most of a second, and few jobs have long texts.
        return max_characters_per_token(self._tokenizer)

    def _check_tokens(self, draft: _Draft) -> None:
        if not draft.token_ids:
            draft.fail(RowErrorType.EMPTY_PROMPT, "the prompt has no tokens")
        elif self._limits is not None:
            draft.error = check_length(len(draft.token_ids), *self._limits)

    def _tokenize(self, drafts: Sequence[_Draft]) -> None:
        """Give each draft its ids, in one call unless one of them makes it fail."""
        if not drafts:
            return
        # A chat template writes the special tokens itself.
        try:
            encoding = self._tokenizer(
                [draft.text for draft in drafts],
                add_special_tokens=not drafts[0].is_chat,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except BaseException as error:
            if not _comes_from_tokenizer(error):
                raise
            if len(drafts) > 1:
                for draft in drafts:
                    self._tokenize([draft])
            elif isinstance(error, MemoryError):
                drafts[0].fail(RowErrorType.OUT_OF_MEMORY, "no memory to tokenize the prompt")
            else:
                name = type(error).__name__
                drafts[0].fail(RowErrorType.BAD_TYPE, f"the tokenizer refuses the prompt ({name})")
        else:
            for draft, token_ids in zip(drafts, encoding["input_ids"], strict=True):
                draft.token_ids = tuple(token_ids)


@dataclass(kw_only=True, slots=True)
class _Draft:
    """One row on its way: a template makes text, messages become text, text becomes ids."""

    row: Row
    params: SamplingParams
    error: RowError | None
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    def fail(self, type: RowErrorType, message: str) -> None:
        self.error = RowError(type, message)

    def take(self, rendered: str | RowError) -> None:
        """Keep what a template made of the row."""
        if isinstance(rendered, RowError):
            self.error = rendered
        elif rendered:
            self.text = rendered
        else:
            self.fail(RowErrorType.EMPTY_PROMPT, "the template renders an empty prompt")


def _good(drafts: Iterable[_Draft]) -> list[_Draft]:
    return [draft for draft in drafts if draft.error is None]


def _comes_from_tokenizer(error: BaseException) -> bool:
    """Whether a prompt may be to blame; a panic of the Rust code is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
