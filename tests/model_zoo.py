"""A tiny random model of every causal language model type that transformers knows.

Configs are shrunk by rules over the names of their fields; a table holds what a type needs beside
the rules, where they lead to a config that its own code rejects.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cbatch_cli.errors import ModelError
from cbatch_cli.models.context_length import resolve_max_model_len
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.loading import checked_model, require_decoder
from tests.tiny_models import INITIALIZER_RANGE, model_of

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

VOCAB_SIZE = 96
NUM_LAYERS = 3
WINDOW = 9
ORIGINAL_POSITIONS = 16
"""`original_max_position_embeddings`, which rows of the test go beyond."""
NUM_POSITIONS = 128

# Fields that hold a number in a default config are given these.
_RULES: dict[str, Any] = {
    name: value
    for value, names in {
        VOCAB_SIZE: "vocab_size unpadded_vocab_size vocab_size_per_layer_input "
        "encoder_hash_byte_group_vocab",
        NUM_POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length",
        NUM_LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers",
        32: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim "
        "input_embedding_size output_embedding_size",
        48: "intermediate_size ffn_dim ffn_hidden_size n_inner dff d_inner feed_forward_size "
        "dim_ff dense_intermediate_size intermediate_size_mlp decoder_ffn_dim",
        16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size mamba_d_head mamba_head_dim router_hidden_size",
        8: "head_dim swa_head_dim kv_channels dim_head qk_nope_head_dim q_lora_rank kv_lora_rank "
        "o_lora_rank laurel_rank gated_norm_rank hidden_size_per_layer_input query_pre_attn_scalar "
        "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim hc_lowrank "
        "loop_gate_rank d_rel mamba_d_state mamba_d_ssm ssm_state_size state_size "
        "pronunciation_embed_dim shape_embed_dim pronunciation_vocab_size shape_vocab_size "
        "zero_expert_num ple_embed_dim rotary_dim",
        6: "v_head_dim",
        4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
        "qk_rope_head_dim mamba_n_heads mamba_num_heads linear_num_heads index_n_heads",
        2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk "
        "moe_k linear_num_key_heads linear_num_value_heads",
        1: "n_group topk_group first_k_dense_replace",
    }.items()
    for name in names.split()
} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}

# From where on a model computes otherwise than for short rows. Rows of the test go beyond.
_THRESHOLDS: dict[str, int] = {
    name: value
    for value, names in {
        WINDOW: "sliding_window sliding_window_size window_size local_attention "
        "attention_window_size attention_chunk_size local_attention_window_len keep_window_size "
        "rel_extent index_topk",
        8: "floor_scale log_scaling_n_floor",
        4: "index_block_size",
        2: "index_topk_blocks",
        ORIGINAL_POSITIONS: "original_max_position_embeddings",
    }.items()
    for name in names.split()
}

# These are given a number also where the default is to compute them.
_GIVEN_ALWAYS = {"head_dim"}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_NOT_PER_LAYER = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
}
# What a type needs to have a config at all.
_MUSIC = {
    "text_encoder": {"model_type": "t5"},
    "audio_encoder": {"model_type": "encodec"},
}
_OUTER_OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": _NOT_PER_LAYER},
    "musicgen": {**_MUSIC, "decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": {**_MUSIC, "decoder": {"model_type": "musicgen_melody_decoder"}},
}

# Multi-modal types, of which only the text part is built: the rest needs packages that we do not.
_TEXT_ONLY = {"gemma3n"}

# What the rules do not find out, by the type of a config or of the one nested in it.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "head_dim": 12,
        "per_layer_config": {},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {"text_config": _NOT_PER_LAYER},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 8,
    },
    "gemma4_unified_text": {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "ministral": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 2,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(
    model_type: str, *, thresholds: bool = True, as_decoder: bool = True, **overrides: Any
) -> PreTrainedConfig:
    """A config of the type with a few thousand weights.

    Without `thresholds` those of the default config stand. With `as_decoder` an encoder in the
    manner of BERT is made the decoder that its config allows for.
    """
    config = _default_config(model_type)
    if model_type in _TEXT_ONLY:
        config = config.text_config
    rules = _RULES | (_THRESHOLDS if thresholds else {})
    return _shrunk(config, rules, overrides, as_decoder=as_decoder)


def load_tiny(config: PreTrainedConfig) -> HFModel:
    """A random model with this config, checked as loading checks one.

    Raises `ModelError` where loading does.
    """
    require_decoder(config)
    try:
        max_model_len = resolve_max_model_len(config, None)
    except ModelError as error:
        if "set max_model_len" not in str(error):
            raise
        max_model_len = resolve_max_model_len(config, NUM_POSITIONS)
    try:
        model = model_of(config)
    except Exception as error:  # as when weights are loaded
        raise ModelError(f"cannot load {config.model_type}: {error}") from error
    return checked_model(
        model,
        "torch",
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )


def require_decoder_type(model_type: str) -> None:
    """Raise `ModelError` as loading does for a type that is no decoder of text."""
    require_decoder(_default_config(model_type))


def _default_config(model_type: str) -> PreTrainedConfig:
    # Some configs take what they are given apart.
    return CONFIG_MAPPING[model_type](**copy.deepcopy(_OUTER_OVERRIDES.get(model_type, {})))


def _shrunk(
    config: PreTrainedConfig,
    rules: dict[str, Any],
    overrides: dict[str, Any],
    *,
    as_decoder: bool,
) -> PreTrainedConfig:
    overrides = _OVERRIDES.get(config.model_type, {}) | overrides
    # Read past the properties that a config computes: only what it was given can be given anew.
    values = vars(config)
    given: dict[str, Any] = {}
    for name in config.sub_configs:
        if isinstance(nested := values.get(name), PreTrainedConfig):
            given[name] = _shrunk(nested, rules, overrides.get(name, {}), as_decoder=as_decoder)
    if "text_config" not in given:
        for name, value in rules.items():
            if type(values.get(name)) in (int, float) or name in _GIVEN_ALWAYS & values.keys():
                given[name] = value
        if "qk_rope_head_dim" in given:  # latent attention: heads share one rotated part of keys
            given |= {"head_dim": given["qk_rope_head_dim"], "num_key_value_heads": 4}
        given |= _layer_kinds(values, rules.get("sliding_window", 4096))
        if isinstance(rope := values.get("rope_parameters"), dict):
            given["rope_parameters"] = _shrunk_rope(rope, rules)
    if as_decoder and values.get("is_decoder") is False and not values.get("is_encoder_decoder"):
        given["is_decoder"] = True
    if "initializer_range" in values:
        given["initializer_range"] = INITIALIZER_RANGE
    given |= {name: value for name, value in overrides.items() if name not in config.sub_configs}
    return type(config)(**given)


def _layer_kinds(values: dict[str, Any], window: int) -> dict[str, Any]:
    """Every kind of layer at least once, the last one as the default's last."""
    defaults = {
        name: list(values[name])
        for name in ("layer_types", "mlp_layer_types", "layers_block_type")
        if isinstance(values.get(name), (list, tuple)) and values[name]
    }
    if not defaults:
        return {}
    fields: dict[str, Any] = {}
    distinct = {name: list(dict.fromkeys(kinds)) for name, kinds in defaults.items()}
    if distinct.get("layer_types") == ["full_attention"] and "sliding_window" in values:
        distinct["layer_types"] = ["sliding_attention", "full_attention"]
        fields["sliding_window"] = window
        if "use_sliding_window" in values:
            fields["use_sliding_window"] = True
    fields["num_hidden_layers"] = max(NUM_LAYERS, *(len(kinds) + 1 for kinds in distinct.values()))
    for name, kinds in distinct.items():
        num_cycled = fields["num_hidden_layers"] - 1
        cycled = [kinds[index % len(kinds)] for index in range(num_cycled)]
        fields[name] = [*cycled, defaults[name][-1]]
    return fields


def _shrunk_rope(rope: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    shrunk = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _shrunk_rope(value, rules)
        elif name == "original_max_position_embeddings":
            value = rules.get(name, value)
        shrunk[name] = value
    return shrunk
