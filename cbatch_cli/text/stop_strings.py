"""Stop strings: noticed while an answer grows, and cut off when it is finished.

A token completes a stop string if the text up to and with it holds the string and the text before
it did not. The first token that completes one ends the answer; of the strings it completes, the
one that starts first in the text is cut at. So the answer depends on the ids up to that token
alone, however many more the engine made before it heard. A string completed before `min_tokens`
ids does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbatch_cli.request import FinishReason, RequestKey, SamplingParams
from cbatch_cli.text.detokenizer import Detokenizer, GrowingText


class FinishedText(NamedTuple):
    """An answer as the output holds it: its text, how many ids it keeps, and why it ended."""

    text: str
    num_tokens: int
    finish_reason: FinishReason


class StopStringWatcher:
    """Follows the answers that have stop strings. One thread feeds it; others may add."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._searches: dict[RequestKey, _Search] = {}

    def add(
        self,
        key: RequestKey,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        resumed_token_ids: Sequence[int] = (),
    ) -> None:
        """Start to follow an answer; nothing happens where `params` has no stop strings."""
        if params.stop:
            search = _Search(self._detokenizer, prompt_token_ids, params)
            search.feed(resumed_token_ids)
            self._searches[key] = search

    def feed(self, key: RequestKey, new_token_ids: Sequence[int]) -> int | None:
        """Take in new output ids; the number of ids to keep once a stop string is complete.

        The token that completes it is the last one kept. None while there is none.
        """
        search = self._searches.get(key)
        return search.feed(new_token_ids) if search is not None else None

    def discard(self, key: RequestKey) -> None:
        """Forget an answer that has ended; one that is not followed is no error."""
        self._searches.pop(key, None)


def finalize(
    detokenizer: Detokenizer,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    finish_reason: FinishReason,
) -> FinishedText:
    """The text of a finished answer, its stop string and surplus ids cut off.

    This decides, whatever the watcher said: it sees the same ids. EOS is not part of the text.
    """
    ends_with_eos = finish_reason is FinishReason.STOP and (
        not token_ids or token_ids[-1] not in params.stop_token_ids
    )
    # Not every tokenizer counts EOS among its special tokens, which have no text anyway.
    shown = token_ids[:-1] if ends_with_eos else token_ids
    if params.stop:
        search = _Search(detokenizer, prompt_token_ids, params)
        num_tokens = search.feed(shown)
        if num_tokens is not None:
            return FinishedText(search.text, num_tokens, FinishReason.STOP_SEQUENCE)
    return FinishedText(detokenizer.decode(prompt_token_ids, shown), len(token_ids), finish_reason)


class _Search:
    """Looks for the stop strings of one answer."""

    def __init__(
        self, detokenizer: Detokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._growing = GrowingText(detokenizer, prompt_token_ids)
        self._stop = params.stop
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._found = False
        self.text = ""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        for token_id in token_ids:
            if self._found:
                break
            self._num_tokens += 1
            delta = self._growing.push(token_id)
            num_before = len(self.text)
            self.text += delta
            if delta and self._num_tokens >= self._min_tokens:
                self._cut(num_before)
        return self._num_tokens if self._found else None

    def _cut(self, num_before: int) -> None:
        """Cut at the first stop string that ends beyond the first `num_before` characters."""
        starts = [self.text.find(s, max(0, num_before - len(s) + 1)) for s in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            self._found = True
            self.text = self.text[: min(found)]
