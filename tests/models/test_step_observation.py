"""What counts as an operation of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cbatch_kernels.cpu_library import load_kernels
from torch import Tensor

from cbatch_cli.models.fusion import fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.step_observation import CountedKernels, decoder_layers, observe_step
from tests.tiny_models import tiny_model


def wrapped(name: str = "llama") -> HFModel:
    return HFModel(
        tiny_model(name), max_model_len=512, eos_token_ids=frozenset(), generation_defaults={}
    )


def counts_with(addition: Callable[[Tensor], object]) -> tuple[int, ...]:
    """Operations by layer where the second layer does `addition` too."""
    model = wrapped()
    mlp = decoder_layers(model)[1].mlp
    forward: Any = mlp.forward

    def longer(hidden: Tensor) -> Tensor:
        addition(hidden)
        result: Tensor = forward(hidden)
        return result

    mlp.forward = longer
    return observe_step(model, None).operations_per_layer


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        (lambda hidden: hidden.view(-1), 0),
        (lambda hidden: hidden.transpose(0, 1)[:, :1], 0),
        (lambda hidden: hidden.contiguous(), 0),
        (lambda hidden: hidden.to(torch.float32), 0),
        (lambda hidden: hidden.reshape(-1), 0),
        (lambda hidden: torch.empty_like(hidden), 0),
        (lambda hidden: hidden.mT.contiguous(), 1),
        (lambda hidden: hidden.double(), 1),
        (lambda hidden: hidden.add_(0.0), 1),
        (lambda hidden: torch.zeros(3), 1),
        (lambda hidden: hidden @ hidden[0].mT, 1),
        (lambda hidden: torch.nn.functional.linear(hidden, hidden[0]), 1),
        (lambda hidden: hidden.chunk(2, dim=-1), 0),
        (lambda hidden: hidden.sum() + hidden.mean(), 3),
    ],
)
def test_what_counts(addition: Callable[[Tensor], object], expected: int) -> None:
    plain = observe_step(wrapped(), None).operations_per_layer
    assert counts_with(addition) == (plain[0], plain[1] + expected, plain[2])


def test_our_kernels_count() -> None:
    model = wrapped()
    model.attention_backend = "cpu"
    kernels = CountedKernels(load_kernels())
    assert all(names["cbatch::attention"] == 1 for names in observe_step(model, kernels).operations)
    fuse_layers(model, mode="deterministic", kernels=kernels)
    for names in observe_step(model, kernels).operations:
        assert names["cbatch::linear"] == 4 and names["cbatch::attention"] == 1
    assert kernels.on_call is None


def test_a_layer_is_the_block_around_its_attention() -> None:
    model = wrapped("gpt2")
    assert decoder_layers(model) == list(model.module.transformer.h)


def test_what_attention_is_passed() -> None:
    assert observe_step(wrapped("gemma2_softcap"), None).softcaps == (2.0, 2.0, 2.0)
    gpt = observe_step(wrapped("gpt_oss_sinks"), None)
    assert gpt.has_sinks == (True, True, True) and gpt.softcaps == (None, None, None)
