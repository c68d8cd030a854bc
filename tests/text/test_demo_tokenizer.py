"""The packaged model's tokenizer: a vocabulary of real size, and prompts of absurd size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import Row
from cbatch_cli.errors import RowError, RowErrorType
from cbatch_cli.models.loading import resolve_model
from cbatch_cli.request import FinishReason, SamplingParams
from cbatch_cli.text.detokenizer import REPLACEMENT, Detokenizer, GrowingText
from cbatch_cli.text.length import max_characters_per_token
from cbatch_cli.text.prompts import EncodedPrompt, PromptEncoder
from cbatch_cli.text.stop_strings import FinishedText, finalize
from cbatch_cli.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the dog, \n日é€😀ꙮ𒀀")),
    max_size=30,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve_model("gemma-3-270m").folder, trust_remote_code=False)


@pytest.fixture(scope="module")
def detokenizer(tokenizer: PreTrainedTokenizerBase) -> Detokenizer:
    return Detokenizer(tokenizer)


def test_prompts_get_one_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = PromptEncoder(
        tokenizer=tokenizer, prompt=PromptColumns("text", "prompt"), defaults=SamplingParams()
    )
    rows = [Row(0, {"prompt": "The capital of France is"}), Row(1, {"prompt": "  日本の首都は"})]
    encoded = prompts.encode(rows)
    for row, prompt in zip(rows, encoded, strict=True):
        assert isinstance(prompt, EncodedPrompt)
        assert list(prompt.token_ids) == tokenizer(row.columns["prompt"])["input_ids"]
        assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    assert len(encoded[0].token_ids) == 6  # type: ignore[union-attr]


@given(prompt=texts, output=texts)
def test_text_is_that_of_both_less_the_prompt(
    tokenizer: PreTrainedTokenizerBase, detokenizer: Detokenizer, prompt: str, output: str
) -> None:
    prompt_ids = tokenizer(prompt)["input_ids"]
    output_ids = tokenizer(output, add_special_tokens=False)["input_ids"]
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    both = tokenizer.decode(prompt_ids + output_ids, skip_special_tokens=True)
    text = detokenizer.decode(prompt_ids, output_ids)
    assert before + text == both
    growing = GrowingText(detokenizer, prompt_ids)
    assert "".join(map(growing.push, output_ids)) == text.rstrip(REPLACEMENT)


def test_a_stop_string_inside_a_token(
    tokenizer: PreTrainedTokenizerBase, detokenizer: Detokenizer
) -> None:
    prompt_ids = tokenizer("One, two, three,")["input_ids"]
    output_ids = tokenizer(" four, five, six, seven", add_special_tokens=False)["input_ids"]
    params = SamplingParams(stop=("six",))
    finished = finalize(detokenizer, prompt_ids, output_ids, params, FinishReason.LENGTH)
    assert finished == FinishedText(" four, five, ", 5, FinishReason.STOP_SEQUENCE)


def test_a_prompt_of_many_megabytes_is_not_tokenized(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max_characters_per_token(tokenizer) == 31
    batches: list[list[str]] = []
    tokenize = type(tokenizer).__call__

    def recorded(self: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
        batches.append(texts)
        return tokenize(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", recorded)
    prompts = PromptEncoder(
        tokenizer=tokenizer,
        prompt=PromptColumns("text", "prompt"),
        defaults=SamplingParams(),
        max_model_len=32768,
        kv_capacity_tokens=10**6,
    )
    (huge,) = prompts.encode([Row(0, {"prompt": "word " * (2 * 2**20)})])
    assert isinstance(huge, RowError)
    assert huge.type is RowErrorType.PROMPT_TOO_LONG
    assert not batches
    (long,) = prompts.encode([Row(0, {"prompt": "word " * 40_000})])
    assert isinstance(long, RowError)
    assert "has 40002 tokens" in long.message
    assert len(batches) == 1
