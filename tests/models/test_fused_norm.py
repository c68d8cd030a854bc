"""What a norm computes is found by trying it: its order of rounding, its offset, its epsilon."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from cbatch_cli.models.fused_norm import (
    Norm,
    NormStep,
    NotFusable,
    looks_like_norm,
    normed_rows,
    read_norm,
)
from cbatch_cli.models.fused_torch import TorchOperations
from tests.fused_models import EVERY_DTYPE, HALF

MAKERS = (LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm)
ROUNDS_BEFORE_WEIGHT = {LlamaRMSNorm: True, Gemma3RMSNorm: False, Olmo2RMSNorm: False}


def made(maker: Callable[..., nn.Module], dtype: torch.dtype, dim: int = 48) -> nn.Module:
    module = maker(dim, eps=1e-5)
    with torch.no_grad():
        module.weight.add_(0.3 * torch.randn(dim, generator=torch.Generator().manual_seed(3)))
    return module.to(dtype)


def plain_step(norm: Norm) -> NormStep:
    return lambda rows: normed_rows(norm, rows)


def read(module: nn.Module, dtype: torch.dtype, make_step: Callable[[Norm], NormStep]) -> Norm:
    with torch.inference_mode():
        return read_norm(module, "the_norm", dtype, make_step)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("maker", MAKERS)
def test_the_order_of_rounding_is_found(maker: type[nn.Module], dtype: torch.dtype) -> None:
    module = made(maker, dtype)
    norm = read(module, dtype, TorchOperations().norm)
    assert norm.rounds_before_weight == ROUNDS_BEFORE_WEIGHT[maker]
    assert norm.offset == (1.0 if maker is Gemma3RMSNorm else 0.0)
    assert norm.epsilon == 1e-5
    rows = torch.randn(64, 48, dtype=dtype)
    assert (TorchOperations().norm(norm)(rows) == module(rows)).float().mean() > 0.99
    assert torch.equal(plain_step(norm)(rows), module(rows))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_wrong_step_is_refused(maker: type[nn.Module], dtype: torch.dtype) -> None:
    module = made(maker, dtype)
    faults: list[Callable[[Norm], Norm]] = [
        lambda norm: dataclasses.replace(norm, offset=1.0 - norm.offset),
        lambda norm: dataclasses.replace(norm, epsilon=2 * norm.epsilon),
    ]
    if dtype in HALF:  # in float32 both orders are one
        faults.append(
            lambda norm: dataclasses.replace(
                norm, rounds_before_weight=not norm.rounds_before_weight
            )
        )
    for fault in faults:
        with pytest.raises(NotFusable, match="^the_norm is rounded otherwise"):
            read(module, dtype, lambda norm, fault=fault: plain_step(fault(norm)))


class Another(LlamaRMSNorm):
    """Not quite a norm."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 1.02 * super().forward(hidden_states)


class Wide(LlamaRMSNorm):
    """Gives float32 for whatever it is given."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).float()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "module",
    [
        made(Another, torch.float32),
        made(Wide, torch.float32),
        nn.LayerNorm(48),
        nn.LayerNorm(48, bias=False),
        nn.RMSNorm((3, 48), eps=1e-5),
        nn.Linear(48, 48),
        nn.Identity(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm_is_refused(module: nn.Module, dtype: torch.dtype) -> None:
    with pytest.raises(NotFusable, match="^the_norm is no RMSNorm$"):
        read(module.to(dtype), dtype, plain_step)


def test_a_norm_that_is_given_more_is_refused() -> None:
    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return super().forward(hidden_states) * gate

    with pytest.raises(NotFusable, match="^the_norm does not take rows alone$"):
        read(made(Gated, torch.float32), torch.float32, plain_step)


def test_what_looks_like_a_norm() -> None:
    assert looks_like_norm(LlamaRMSNorm(8)) and looks_like_norm(nn.LayerNorm(8))

    class Scale(nn.Module):
        def __init__(self, epsilon: float | None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.anything = epsilon

    assert looks_like_norm(Scale(1e-6)) and not looks_like_norm(Scale(None))
    assert not looks_like_norm(nn.Linear(8, 1, bias=False)) and not looks_like_norm(nn.Dropout(0.1))
