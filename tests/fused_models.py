"""Compares fused models with transformers' own code, and plants faults in what fuses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch_cli.models.fused_operations import LayerOperations
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from tests.model_zoo import load_tiny, tiny_config
from tests.packed_steps import packed_logits
from tests.tiny_models import CONFIGS, model_of, tiny_model

HALF = (torch.bfloat16, torch.float16)
EVERY_DTYPE = (torch.float32, *HALF)

Steps = Sequence[tuple[int, ...]]
"""How many tokens of each row every step takes."""
LONG_STEPS: Steps = ((30, 7, 0), (1, 5, 9), (1, 1, 0), (8, 10, 0))
SHORT_STEPS: Steps = ((8, 0), (1, 3), (2, 1))


def tiny(name: str, *, dtype: torch.dtype = torch.float32) -> HFModel:
    """A model of `CONFIGS`, or a tiny one of any other type."""
    if name not in CONFIGS:
        if dtype == torch.float32:
            return load_tiny(tiny_config(name))
        model = model_of(tiny_config(name), dtype=dtype)
    else:
        model = tiny_model(name, dtype=dtype)
    return HFModel(model, max_model_len=100, eos_token_ids=frozenset(), generation_defaults={})


def fused_as_exactly(
    name: str, dtype: torch.dtype, operations: LayerOperations, *, steps: Steps = LONG_STEPS
) -> FusionReport:
    """Fuse a tiny model and assert that its logits are as exact as transformers' own.

    In float32 they are the same; in half precision they are as far from those of the same weights
    in float32 as transformers' are.
    """
    model = tiny(name, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    rows = [
        torch.randint(model.vocab_size, (sum(lengths),), generator=generator)
        for lengths in zip(*steps, strict=True)
    ]
    own = [model.eager_logits(row, torch.arange(len(row))) for row in rows]
    weights = {key: weight.clone() for key, weight in model.module.state_dict().items()}
    report = fuse_layers(model, operations=operations)
    fused = packed_logits(model, rows, list(steps), block_size=4)
    if dtype == torch.float32:
        for actual, expected in zip(fused, own, strict=True):
            scale = max(expected.abs().max().item(), 1.0)
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-5 * scale)
        return report
    exact_model = tiny(name)
    exact_model.module.load_state_dict(weights)
    exact = [exact_model.eager_logits(row, torch.arange(len(row))) for row in rows]
    assert 0.0 < _error(fused, exact) <= 1.25 * _error(own, exact)
    return report


def _error(logits: list[Tensor], exact: list[Tensor]) -> float:
    """Root mean square over all positions, by each position's spread."""
    errors = [
        (ours - theirs) / theirs.std(dim=-1, keepdim=True)
        for ours, theirs in zip(logits, exact, strict=True)
    ]
    return float(torch.cat(errors).square().mean().sqrt())
