"""Token ids to text: whole answers, and answers that are still growing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNREAD = 32
"""Ids without a whole character among them after which waiting for one is given up."""


class Detokenizer:
    """Turns output ids into text, special tokens left out. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special_token_ids = frozenset(id for id, token in added if token.special)

    def decode(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        """What `token_ids` add to the text of the prompt.

        That is the text of both less the text of the prompt, so a leading space is kept where the
        tokenizer drops it at the start of a text. A character cut off at the end comes out as
        transformers gives it, as U+FFFD.
        """
        context, context_text = self.context(prompt_token_ids)
        text = self.text([*context, *token_ids])
        if text.startswith(context_text):
            return text[len(context_text) :]
        # Ids that are no valid UTF-8 after the bytes that end the prompt spoil those too.
        return self.text(token_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids on their own."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The end of the prompt that decides how the next ids are written, and its text.

        Some tokens that have text, and no half character: in a run of byte tokens one missing
        byte makes all of them U+FFFD. The prompt may be long, so it is not taken whole.
        """
        num_tokens = 4
        while True:
            tail = list(prompt_token_ids[-num_tokens:])
            text = self.text(tail)
            if (text and REPLACEMENT not in text) or num_tokens >= len(prompt_token_ids):
                return tail, text
            num_tokens *= 4


class GrowingText:
    """The text of one answer while its ids arrive, a whole character at a time.

    Decodes a short window, since a tokenizer may write an id differently after another: the
    window starts where a piece of text was known to be whole, and holds at least one such piece.
    Ids that never make valid UTF-8 come out as U+FFFD, perhaps not as many as in the whole text.
    """

    def __init__(self, detokenizer: Detokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._window, self._known = detokenizer.context(prompt_token_ids)
        self._num_read = len(self._window)
        self._num_given = 0

    def push(self, token_id: int) -> str:
        """The text that is certain since `token_id` is here; often none, or more than a word."""
        if token_id in self._detokenizer.special_token_ids:
            return ""
        self._window.append(token_id)
        text = self._detokenizer.text(self._window)[len(self._known) :]
        num_unread = len(self._window) - self._num_read
        is_whole = not text.endswith(REPLACEMENT) or num_unread >= _MAX_UNREAD
        certain = text if is_whole else text.rstrip(REPLACEMENT)
        delta = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if is_whole:
            self._window = self._window[self._num_read :]
            self._num_read = len(self._window)
            self._known = self._detokenizer.text(self._window)
            self._num_given = 0
        return delta
