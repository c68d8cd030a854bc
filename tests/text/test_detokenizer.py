"""Text of output ids, against the tokenizer's own decoding of prompt and output together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch_cli.text.detokenizer import REPLACEMENT, Detokenizer, GrowingText
from tests.tiny_tokenizers import EOS, all_tokenizers, byte_tokenizer, llama_tokenizer

TOKENIZERS = all_tokenizers()
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BYTE_LEVEL = ("byte", "byte_level")

texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the dog, \n日é€😀")),
    max_size=20,
)


def ids_of(name: str, text: str, *, prompt: bool = False) -> list[int]:
    return list(TOKENIZERS[name](text, add_special_tokens=prompt)["input_ids"])


def whole_text(name: str, token_ids: list[int]) -> str:
    return str(TOKENIZERS[name].decode(token_ids, skip_special_tokens=True))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=texts, output=texts)
def test_decode_is_the_text_of_both_less_the_text_of_the_prompt(
    name: str, prompt: str, output: str
) -> None:
    prompt_ids, output_ids = ids_of(name, prompt, prompt=True), ids_of(name, output)
    both = whole_text(name, prompt_ids + output_ids)
    assert whole_text(name, prompt_ids) + DETOKENIZERS[name].decode(prompt_ids, output_ids) == both


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(prompt=texts, data=st.data())
def test_decode_gives_broken_characters_as_transformers_does(
    name: str, prompt: str, data: st.DataObject
) -> None:
    id_range = st.integers(0, len(TOKENIZERS[name]) - 1)
    output_ids = data.draw(st.lists(id_range, max_size=20))
    prompt_ids = ids_of(name, prompt, prompt=True)
    both = whole_text(name, prompt_ids + output_ids)
    assert whole_text(name, prompt_ids) + DETOKENIZERS[name].decode(prompt_ids, output_ids) == both


@pytest.mark.parametrize("name", TOKENIZERS)
@given(prompt=texts, output=texts)
def test_growing_text_adds_up_to_the_whole(name: str, prompt: str, output: str) -> None:
    prompt_ids, output_ids = ids_of(name, prompt, prompt=True), ids_of(name, output)
    growing = GrowingText(DETOKENIZERS[name], prompt_ids)
    text = "".join(map(growing.push, output_ids))
    assert text == DETOKENIZERS[name].decode(prompt_ids, output_ids).rstrip(REPLACEMENT)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=st.data())
def test_growing_text_is_at_every_id_all_that_is_certain(name: str, data: st.DataObject) -> None:
    id_range = st.integers(0, len(TOKENIZERS[name]) - 1)
    output_ids = data.draw(st.lists(id_range, max_size=24))
    prompt_ids = ids_of(name, "naïve", prompt=True)
    growing = GrowingText(DETOKENIZERS[name], prompt_ids)
    text = ""
    for end, token_id in enumerate(output_ids, 1):
        text += growing.push(token_id)
        whole = DETOKENIZERS[name].decode(prompt_ids, output_ids[:end])
        assert text == whole.rstrip(REPLACEMENT)


def test_a_leading_space_of_the_answer_is_kept() -> None:
    tokenizer = llama_tokenizer()
    prompt_ids = tokenizer("stop")["input_ids"]
    output_ids = tokenizer("stop dog")["input_ids"][len(prompt_ids) :]
    assert tokenizer.decode(output_ids) == "dog"
    assert Detokenizer(tokenizer).decode(prompt_ids, output_ids) == " dog"


def test_a_prompt_of_special_tokens_alone_gives_no_context() -> None:
    tokenizer = llama_tokenizer()
    output_ids = tokenizer("the dog", add_special_tokens=False)["input_ids"]
    prompt_ids = [tokenizer.bos_token_id] * 9
    expected = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=True)
    assert Detokenizer(tokenizer).decode(prompt_ids, output_ids) == expected == "the dog"


def test_special_tokens_at_the_end_of_the_prompt_hide_no_context() -> None:
    tokenizer = llama_tokenizer()
    stop_ids, stop_dog_ids = tokenizer("stop")["input_ids"], tokenizer("stop dog")["input_ids"]
    prompt_ids = [*stop_ids, *[tokenizer.eos_token_id] * 20]
    output_ids = stop_dog_ids[len(stop_ids) :]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode(prompt_ids, output_ids) == " dog"
    growing = GrowingText(detokenizer, stop_ids)
    assert "".join(map(growing.push, [tokenizer.eos_token_id, *output_ids])) == " dog"


def test_special_tokens_are_no_text() -> None:
    tokenizer = byte_tokenizer()
    eos_id = tokenizer.convert_tokens_to_ids(EOS)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode([104], [105, eos_id, 33]) == "i!"
    growing = GrowingText(detokenizer, [104])
    assert [growing.push(i) for i in (105, eos_id, 33)] == ["i", "", "!"]


def test_bytes_that_break_the_end_of_the_prompt_are_decoded_alone() -> None:
    tokenizer = llama_tokenizer()
    euro = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode([*euro], [euro[0]]) == REPLACEMENT
    assert detokenizer.decode([*euro], [*euro]) == "€"


def test_a_run_of_byte_tokens_in_the_prompt_is_not_cut_in_the_middle() -> None:
    tokenizer = llama_tokenizer()
    prompt_ids = tokenizer("日本の首都")["input_ids"]
    output_ids = tokenizer("x東京")["input_ids"][3:]
    assert tokenizer.decode(prompt_ids + output_ids).endswith("都東京")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode(prompt_ids, output_ids) == "東京"
    assert "".join(map(GrowingText(detokenizer, prompt_ids).push, output_ids)) == "東京"


@pytest.mark.parametrize("token_id", [0x80, 0xE2, 257])
def test_ids_that_never_become_text_do_not_widen_the_window(
    token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    longest = 0

    def text(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return Detokenizer.text(detokenizer, token_ids)

    monkeypatch.setattr(detokenizer, "text", text)
    growing = GrowingText(detokenizer, [104])
    answer = "".join(map(growing.push, [token_id] * 1000 + [33]))
    assert answer.endswith("!")
    assert longest < 100
