"""Models of published shapes with random weights: as fast as the real ones, and never fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbatch_cli.config import AttentionBackendChoice
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.loading import checked_model

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
}
"""By the name of the model whose shape it is."""


def random_model(
    shape: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    attention_backend: AttentionBackendChoice = "auto",
) -> HFModel:
    """A model of this shape, a value of `SHAPES` or the like, checked as a loaded one is.

    It has no end-of-sequence token. Raises `ModelError` for a type that cannot be run.
    """
    values = dict(shape)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return checked_model(
        model.eval(),
        attention_backend,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
