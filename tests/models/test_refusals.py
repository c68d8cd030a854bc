"""Models that would give wrong answers are refused, with a sentence that says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cbatch_cli.attention import torch_backend
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.errors import ModelError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.self_check import self_check
from tests.tiny_models import CONFIGS, INITIALIZER_RANGE, VOCAB_SIZE, model_of, tiny_model


def wrap(model: transformers.PreTrainedModel) -> HFModel:
    return HFModel(model, max_model_len=512, eos_token_ids=frozenset(), generation_defaults={})


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": INITIALIZER_RANGE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT_SHAPE = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4}


def bidirectional_llama() -> transformers.PreTrainedConfig:
    config = CONFIGS["llama"]()
    config.is_causal = False
    return config


def chunked_llama4() -> transformers.PreTrainedConfig:
    return transformers.Llama4TextConfig(
        **SMALL,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=8192,
    )


def short_convolutions() -> transformers.PreTrainedConfig:
    return transformers.Lfm2Config(
        **SMALL,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )


REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "state space": (
        lambda: transformers.MambaConfig(**SMALL, state_size=4),
        "models of type mamba cannot be run: it keeps a recurrent state",
    ),
    "bidirectional encoder": (
        lambda: transformers.BertConfig(**BERT_SHAPE),
        "models of type bert cannot be run: a token does not simply see the tokens before it",
    ),
    "bidirectional decoder": (
        bidirectional_llama,
        "models of type llama cannot be run: a token does not simply see the tokens before it",
    ),
    "attention in chunks": (
        chunked_llama4,
        "models of type llama4_text cannot be run: a token does not simply see the tokens before",
    ),
    "convolution layers": (
        short_convolutions,
        "models of type lfm2 cannot be run: only 1 of its 2 layers are attention layers",
    ),
    "no attention function": (
        lambda: transformers.BloomConfig(**{**SMALL, "n_layer": 2, "n_head": 4}),
        "models of type bloom cannot be run: its attention cannot be replaced in transformers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_its_reason(kind: str) -> None:
    make_config, reason = REFUSED[kind]
    with pytest.raises(ModelError) as caught:
        self_check(wrap(model_of(make_config())))
    assert str(caught.value).startswith(reason)


def attention_layers(model: transformers.PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def keyword_passer(attention: Any, **extra: Any) -> Callable[..., Any]:
    forward = attention.forward

    def forward_with_extra(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **extra)

    return forward_with_extra


def test_an_unknown_attention_keyword_is_refused_by_name() -> None:
    model = tiny_model("llama")
    attention = attention_layers(model)[1]
    attention.forward = keyword_passer(attention, position_bias=torch.zeros(1))
    with pytest.raises(ModelError, match="pass 'position_bias', which is not supported"):
        wrap(model)


def test_an_unknown_attention_keyword_that_is_none_is_fine() -> None:
    model = tiny_model("llama")
    attention = attention_layers(model)[1]
    attention.forward = keyword_passer(attention, position_bias=None)
    self_check(wrap(model))


def test_a_keyword_that_comes_later_is_refused_then() -> None:
    model = tiny_model("llama")
    wrapped = wrap(model)
    attention = attention_layers(model)[1]
    attention.forward = keyword_passer(attention, position_bias=torch.zeros(1))
    with pytest.raises(ModelError, match="models of type llama .*'position_bias'"):
        self_check(wrapped)


def test_a_layer_that_changes_its_mask_is_refused() -> None:
    model = tiny_model("llama")
    attention = attention_layers(model)[1]
    forward = attention.forward

    def with_bias(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        bias = torch.arange(attention_mask.shape[-1])
        return forward(*args, attention_mask=attention_mask + bias, **kwargs)

    attention.forward = with_bias
    with pytest.raises(ModelError, match="it changes the attention mask before it attends"):
        wrap(model)


def test_a_layer_that_runs_twice_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(ModelError, match="the same attention layer more than once"):
        wrap(model)


@pytest.mark.parametrize("name", ["mistral_window", "gemma3", "gpt_oss_sinks"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_self_check_sees_a_wrong_window(name: str, change: int | None) -> None:
    wrapped = wrap(tiny_model(name))
    specs = wrapped._recording.specs
    assert specs[0].sliding_window is not None
    wrong = None if change is None else specs[0].sliding_window + change
    specs[0] = dataclasses.replace(specs[0], sliding_window=wrong)
    with pytest.raises(ModelError, match="differ from those of their own attention"):
        self_check(wrapped)


@pytest.mark.parametrize("change", [-1, 1])
def test_self_check_reaches_beyond_windows_that_are_not_long(change: int) -> None:
    config = CONFIGS["mistral_window"]()
    config.sliding_window = 100
    wrapped = wrap(model_of(config))
    self_check(wrapped)
    specs = wrapped._recording.specs
    specs[0] = dataclasses.replace(specs[0], sliding_window=100 + change)
    with pytest.raises(ModelError, match="differ from those of their own attention"):
        self_check(wrapped)


def test_the_mask_says_how_far_a_layer_sees() -> None:
    model = tiny_model("gemma2_softcap")
    model.config.sliding_window = 5
    assert attention_layers(model)[0].sliding_window == 7
    wrapped = wrap(model)
    assert [spec.sliding_window for spec in wrapped.layer_specs] == [5, None, 5]
    self_check(wrapped)


def test_self_check_sees_a_rope_shared_by_the_pack() -> None:
    model = tiny_model("llama")
    rope = model.model.rotary_emb
    forward = rope.forward

    def stretched(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        factor = 1.0 + position_ids.max() / 100.0
        return forward(x, position_ids / factor)

    rope.forward = stretched
    with pytest.raises(ModelError, match="differ from those of their own attention"):
        self_check(wrap(model))


def test_self_check_sees_tokens_mixed_outside_attention() -> None:
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def shifted(hidden: Tensor) -> Tensor:
        return forward(hidden + 0.1 * hidden.roll(1, dims=1))

    mlp.forward = shifted
    with pytest.raises(ModelError, match="differ from those of their own attention"):
        self_check(wrap(model))


@pytest.mark.parametrize(
    ("name", "dropped"), [("gpt_oss_sinks", "sinks"), ("gemma2_softcap", "softcap")]
)
def test_self_check_sees_a_backend_that_ignores_an_argument(
    name: str, dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(TorchAttentionBackend):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            assert kwargs[dropped] is not None
            return super().forward(*args, **{**kwargs, dropped: None})

    monkeypatch.setattr(torch_backend, "TorchAttentionBackend", Forgetful)
    with pytest.raises(ModelError, match="differ from those of their own attention"):
        self_check(wrap(tiny_model(name)))


def test_self_check_does_not_take_nan_for_a_small_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(TorchAttentionBackend):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) * torch.nan

    monkeypatch.setattr(torch_backend, "TorchAttentionBackend", Broken)
    with pytest.raises(ModelError, match="by nan of the logits' spread"):
        self_check(wrap(tiny_model("llama")))
