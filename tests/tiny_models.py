"""Random models of a few thousand weights, one per way in which attention differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.tiny_tokenizers import save_byte_tokenizer

# Large, so that attention is far from uniform and a wrong position or mask moves the logits.
INITIALIZER_RANGE = 0.25

VOCAB_SIZE = 288
EOS_TOKEN_ID = 257
"""As in the byte tokenizer."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 258,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "mistral_window": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=9),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "gemma2_softcap": lambda: transformers.Gemma2Config(
        **_SHAPE,
        sliding_window=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPE,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
    ),
    "gpt_oss_sinks": lambda: transformers.GptOssConfig(
        **_SHAPE,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "phi3": lambda: transformers.Phi3Config(**_SHAPE),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SHAPE, **_EXPERTS),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=256,
        eos_token_id=EOS_TOKEN_ID,
    ),
    "deepseek_v3_unequal_dims": lambda: transformers.DeepseekV3Config(
        **{**_SHAPE, "head_dim": 4, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
    ),
}


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model in evaluation mode; `name` is a key of `CONFIGS`."""
    return model_of(CONFIGS[name](), seed=seed, dtype=dtype)


def model_of(
    config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model with this config, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # Families differ in what they start at zero or one; nothing is left without effect here.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or "sink" in name:
                    parameter.add_(torch.randn_like(parameter) * INITIALIZER_RANGE)
    return model.eval()


def save_tiny_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """A folder with a random model and the byte tokenizer."""
    tiny_model(name, seed=seed).save_pretrained(folder)
    return save_byte_tokenizer(folder)


def tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """A folder with a random Llama and the byte tokenizer."""
    return save_tiny_model("llama", folder, seed=seed)
