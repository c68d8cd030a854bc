"""How long a row may be: the config's limit, a user's smaller one, and rope that rows share."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import transformers

from cbatch_cli.errors import ModelError
from cbatch_cli.models.context_length import resolve_max_model_len

HEAD_DIM = 8


def phi3(original: int = 64) -> transformers.PreTrainedConfig:
    factors = [1.0 + index for index in range(HEAD_DIM // 2)]
    return transformers.Phi3Config(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": original,
            "short_factor": factors,
            "long_factor": factors,
        },
    )


def llama(**rope: Any) -> transformers.PreTrainedConfig:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return transformers.LlamaConfig(max_position_embeddings=512, rope_parameters=parameters)


def test_all_that_the_model_has_unless_less_is_asked_for() -> None:
    assert resolve_max_model_len(llama(), None) == 512
    assert resolve_max_model_len(llama(), 100) == 100


def test_more_than_the_model_has_is_refused() -> None:
    with pytest.raises(ModelError, match="max_model_len 513 is too long: llama has 512 positions"):
        resolve_max_model_len(llama(), 513)


def test_the_text_part_of_a_multimodal_config_counts() -> None:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(max_position_embeddings=300)
    )
    assert resolve_max_model_len(config, None) == 300


def test_a_config_that_names_no_length_needs_one() -> None:
    config = transformers.BloomConfig()
    assert not hasattr(config, "max_position_embeddings")
    with pytest.raises(ModelError, match="does not say how long its context is"):
        resolve_max_model_len(config, None)
    assert resolve_max_model_len(config, 77) == 77


def test_longrope_is_cut_where_rows_would_share_its_factors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_max_model_len(phi3(), None) == 64
    assert "max_model_len is 64" in caplog.text
    assert resolve_max_model_len(phi3(), 60) == 60
    with pytest.raises(ModelError, match="max_model_len 65 is too long: beyond 64 tokens"):
        resolve_max_model_len(phi3(), 65)


def test_dynamic_rope_stays_within_the_trained_length() -> None:
    assert resolve_max_model_len(llama(rope_type="dynamic", factor=2.0), None) == 512
    with pytest.raises(ModelError):
        resolve_max_model_len(llama(rope_type="dynamic", factor=2.0), 600)


def test_rope_settings_by_kind_of_layer_are_read(caplog: pytest.LogCaptureFixture) -> None:
    config = llama()
    config.rope_parameters = {
        "full_attention": phi3(32).rope_parameters,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert resolve_max_model_len(config, None) == 32
