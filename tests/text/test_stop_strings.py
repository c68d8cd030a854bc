"""Where an answer ends, against a definition that decodes every prefix from the start."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch_cli.request import FinishReason, RequestKey, SamplingParams
from cbatch_cli.text.detokenizer import REPLACEMENT, Detokenizer
from cbatch_cli.text.stop_strings import FinishedText, StopStringWatcher, finalize
from tests.tiny_tokenizers import all_tokenizers, byte_tokenizer

TOKENIZERS = all_tokenizers()
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
KEY = RequestKey(0)
EOS_ID = 257

texts = st.text(st.sampled_from("aab €日😀\n"), max_size=24)
stop_strings = st.lists(
    st.text(st.sampled_from("aab €日😀"), min_size=1, max_size=4), min_size=1, max_size=3
)


def expected_end(
    name: str, prompt_ids: list[int], output_ids: list[int], params: SamplingParams
) -> tuple[str, int] | None:
    """The definition: the first id that completes a stop string, and the text before it."""
    before = ""
    for end in range(1, len(output_ids) + 1):
        text = DETOKENIZERS[name].decode(prompt_ids, output_ids[:end]).rstrip(REPLACEMENT)
        if len(text) < len(before):  # half a character hides the run of byte tokens before it
            text = before
        completed = [
            start
            for stop in params.stop
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if completed and end >= params.min_tokens:
            return text[: min(completed)], end
        before = text
    return None


def ids_of(name: str, text: str) -> list[int]:
    return list(TOKENIZERS[name](text, add_special_tokens=False)["input_ids"])


def watch(
    name: str, prompt_ids: list[int], chunks: list[list[int]], params: SamplingParams
) -> int | None:
    watcher = StopStringWatcher(DETOKENIZERS[name])
    watcher.add(KEY, prompt_ids, params)
    kept = None
    for chunk in chunks:
        kept = watcher.feed(KEY, chunk)
    return kept


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=texts, output=texts, stop=stop_strings, min_tokens=st.integers(0, 6), data=st.data())
def test_watcher_and_finalize_agree_with_the_definition(
    name: str, prompt: str, output: str, stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    params = SamplingParams(stop=tuple(stop), min_tokens=min_tokens)
    prompt_ids, output_ids = ids_of(name, prompt), ids_of(name, output)
    cut = data.draw(st.integers(0, len(output_ids)))
    end = expected_end(name, prompt_ids, output_ids, params)
    kept = watch(name, prompt_ids, [output_ids[:cut], output_ids[cut:]], params)
    finished = finalize(DETOKENIZERS[name], prompt_ids, output_ids, params, FinishReason.LENGTH)
    if end is None:
        assert kept is None
        text = DETOKENIZERS[name].decode(prompt_ids, output_ids)
        assert finished == FinishedText(text, len(output_ids), FinishReason.LENGTH)
    else:
        text, num_tokens = end
        assert kept == num_tokens
        assert finished == FinishedText(text, num_tokens, FinishReason.STOP_SEQUENCE)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(output=texts, surplus=texts, stop=stop_strings)
def test_surplus_ids_change_nothing(name: str, output: str, surplus: str, stop: list[str]) -> None:
    params = SamplingParams(stop=tuple(stop))
    output_ids = ids_of(name, output)
    end = expected_end(name, [], output_ids, params)
    if end is None:
        return
    exact = output_ids[: end[1]]
    for more in ([], output_ids[end[1] :], ids_of(name, surplus), [0] * 9):
        finished = finalize(DETOKENIZERS[name], [], exact + more, params, FinishReason.LENGTH)
        assert finished == FinishedText(*end, FinishReason.STOP_SEQUENCE)


def finish(output: bytes | list[int], *stop: str, **fields: object) -> FinishedText:
    params = dataclasses.replace(SamplingParams(stop=stop), **fields)  # type: ignore[arg-type]
    detokenizer = Detokenizer(byte_tokenizer())
    return finalize(detokenizer, [104], list(output), params, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("output", "stop", "text", "num_tokens"),
    [
        (b"one two three", ["two"], "one ", 7),
        (b"one two three", ["three", "two"], "one ", 7),
        (b"abcd", ["abc", "ab"], "", 2),  # the shorter one is complete first
        (b"xabcd", ["bc", "abcd"], "xa", 4),
        ("für €5".encode(), ["€"], "für ", 8),
        ("für €5".encode(), ["ür"], "f", 4),
        (b"aab", ["ab"], "a", 3),
        (b"STOP\xe2\x82", ["STOP"], "", 4),  # a character cut off after it hides nothing
    ],
)
def test_examples(output: bytes, stop: list[str], text: str, num_tokens: int) -> None:
    assert finish(output, *stop) == FinishedText(text, num_tokens, FinishReason.STOP_SEQUENCE)


def test_of_two_completed_by_one_token_the_earlier_in_the_text_is_cut_at() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    the = tokenizer.convert_tokens_to_ids("Ġthe")
    params = SamplingParams(stop=("he", " the"))
    finished = finalize(DETOKENIZERS["byte_level"], [], [the], params, FinishReason.LENGTH)
    assert finished == FinishedText("", 1, FinishReason.STOP_SEQUENCE)


def test_a_stop_string_completed_before_min_tokens_does_not_count() -> None:
    assert finish(b"ab ab", "ab", min_tokens=2).num_tokens == 2
    assert finish(b"ab ab", "ab", min_tokens=3) == FinishedText(
        "ab ", 5, FinishReason.STOP_SEQUENCE
    )
    # Begun before and completed at it counts.
    assert finish(b"aaaa", "aa", min_tokens=3) == FinishedText("a", 3, FinishReason.STOP_SEQUENCE)


def test_a_prompt_that_ends_with_half_of_a_stop_string_does_not_begin_it() -> None:
    params = SamplingParams(stop=("ab",))
    detokenizer = Detokenizer(byte_tokenizer())
    finished = finalize(detokenizer, [97], [98, 99], params, FinishReason.LENGTH)
    assert finished == FinishedText("bc", 2, FinishReason.LENGTH)


def test_eos_is_counted_but_is_no_text() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    params = SamplingParams(stop=("zz",))
    finished = finalize(detokenizer, [104], [105, EOS_ID], params, FinishReason.STOP)
    assert finished == FinishedText("i", 2, FinishReason.STOP)
    # An EOS that the tokenizer takes for ordinary text.
    finished = finalize(detokenizer, [104], [105, 10], params, FinishReason.STOP)
    assert finished == FinishedText("i", 2, FinishReason.STOP)
    assert finalize(detokenizer, [], [10], params, FinishReason.STOP).text == ""


def test_a_stop_token_that_is_text_stays() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    params = SamplingParams(stop_token_ids=(46,))
    finished = finalize(detokenizer, [104], [105, 46], params, FinishReason.STOP)
    assert finished == FinishedText("i.", 2, FinishReason.STOP)


def test_no_output_ids() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    params = SamplingParams(stop=("x",))
    finished = finalize(detokenizer, [104], (), params, FinishReason.CANCELLED)
    assert finished == FinishedText("", 0, FinishReason.CANCELLED)


def test_watcher_follows_only_what_has_stop_strings() -> None:
    watcher = StopStringWatcher(Detokenizer(byte_tokenizer()))
    watcher.add(KEY, [104], SamplingParams())
    assert watcher.feed(KEY, [97]) is None
    watcher.add(KEY, [104], SamplingParams(stop=("ab",)))
    assert watcher.feed(KEY, [97]) is None
    assert watcher.feed(KEY, [98, 99]) == 2
    assert watcher.feed(KEY, [99]) == 2
    watcher.discard(KEY)
    watcher.discard(KEY)
    assert watcher.feed(KEY, [97, 98]) is None


def test_watcher_counts_resumed_ids() -> None:
    watcher = StopStringWatcher(Detokenizer(byte_tokenizer()))
    params = SamplingParams(stop=("abc",), min_tokens=3)
    watcher.add(KEY, [104], params, [97, 98])
    assert watcher.feed(KEY, [99]) == 3
