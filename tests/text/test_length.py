"""Lengths of prompts, and the bound on the characters of a token against the tokenizers."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from cbatch_cli.errors import RowErrorType
from cbatch_cli.request import check_length
from cbatch_cli.text.length import check_characters, max_characters_per_token
from tests.tiny_tokenizers import all_tokenizers, byte_level_tokenizer, gemma_tokenizer

TOKENIZERS = all_tokenizers()


def test_one_token_more_than_the_prompt_must_fit() -> None:
    assert check_length(9, 10, 10) is None
    for limits, name in (((10, 99), "context of 10"), ((99, 10), "KV cache of 10")):
        error = check_length(10, *limits)
        assert error is not None
        assert error.type is RowErrorType.PROMPT_TOO_LONG
        assert error.message == (
            f"the prompt has 10 tokens; with 1 to generate that exceeds the {name}"
        )


def test_characters_refuse_only_what_tokens_would() -> None:
    assert check_characters(9 * 4, 4, 10, 10) is None
    error = check_characters(9 * 4 + 1, 4, 10, 99)
    assert error is not None
    assert "at least 10 tokens" in error.message


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the dog")))
)
def test_no_token_stands_for_more_characters_than_the_bound(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    bound = max_characters_per_token(tokenizer)
    assert bound is not None
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert num_tokens * bound >= len(text)


@given(text=st.text(st.sampled_from("eé\u0301\u0308αᾂ\u0313\u0300\u0345각\u1100\u1161\u11a8")))
def test_composition_is_in_the_bound(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    plain_bound = max_characters_per_token(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    bound = max_characters_per_token(tokenizer)
    assert plain_bound is not None and bound is not None
    assert bound == 4 * plain_bound
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert num_tokens * bound >= len(text)


def test_no_canonical_decomposition_is_longer_than_four() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert longest == 4


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.NFKC(),
        normalizers.Replace("  ", " "),
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
    ],
)
def test_a_normalizer_that_may_shorten_has_no_bound(normalizer: normalizers.Normalizer) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    assert max_characters_per_token(tokenizer) is None


def test_a_split_that_drops_characters_has_no_bound() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    assert max_characters_per_token(tokenizer) is None


def test_a_token_that_swallows_spaces_has_no_bound() -> None:
    tokenizer = gemma_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert max_characters_per_token(tokenizer) is None


def test_a_model_without_all_bytes_has_no_bound() -> None:
    tokenizer = gemma_tokenizer()
    tokenizer.backend_tokenizer.model.byte_fallback = False
    assert max_characters_per_token(tokenizer) is None
