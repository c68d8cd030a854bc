"""Replaces a model's product with its vocabulary on a CPU, where numbers show no difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cbatch_kernels.cpu_head import VocabularyHead
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, choose_linear, rounds_weights
from torch import Tensor, nn

from cbatch_cli.models.fusion_probe import ROUNDED_TOLERANCE, TOLERANCE, Probe, relative_error
from cbatch_cli.models.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class FusedHead:
    """What took the place of a head."""

    kind: str
    vocabulary: VocabularyHead | None = None

    def release(self) -> None:
        """Let go of what only a look at all logits needed; it is made again if need be."""
        if self.vocabulary is not None:
            self.vocabulary.release_all_logits()


@torch.inference_mode()
def fuse_head(
    model: HFModel, probe: Probe, *, mode: LinearMode, kernels: CPUKernels
) -> FusedHead | None:
    """Replace the output head of `model` in place; returns what replaces it, or None.

    `probe` has the logits of `model` as it was.
    """
    head = model.head
    if type(head) is not nn.Linear:
        return None
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    rows = torch.randn(3, head.in_features, generator=torch.Generator().manual_seed(0))
    own_forward = head.forward
    is_rounded = rounds_weights(mode)
    if is_rounded or bias is None:
        vocabulary = VocabularyHead(weight, bias, mode=mode, kernels=kernels)
        if is_rounded and not _is_close(vocabulary.all_logits, head, rows, ROUNDED_TOLERANCE):
            return None

        def product(rows: Tensor) -> Tensor:
            largest = vocabulary.largest_logits(rows) if model.wants_largest else None
            if largest is not None:
                model.largest_ids = largest.token_ids
            logits: Tensor = (
                vocabulary.all_logits(rows) if largest is None else largest.values[:, None]
            )
            return logits

        _replace_product(head, product)
        # What follows the product, a cap or a scale, could put another logit first.
        if _has_same_largest(probe, is_rounded=is_rounded):
            return FusedHead(vocabulary.kind, vocabulary)
        if is_rounded:
            _replace_product(head, vocabulary.all_logits)
            return FusedHead(vocabulary.kind)
        head.forward = own_forward  # type: ignore[method-assign]
    linear = choose_linear(weight, bias, mode=mode, kernels=kernels)
    if not _is_close(linear, head, rows, TOLERANCE):
        return None
    _replace_product(head, linear)
    return FusedHead(linear.kind)


def _replace_product(head: nn.Linear, product: Callable[[Tensor], Tensor]) -> None:
    """Have `head` multiply by `product`, which takes rows `[T, K]`."""

    def forward(hidden_states: Tensor) -> Tensor:
        logits = product(hidden_states.flatten(0, -2))
        return logits.view(*hidden_states.shape[:-1], logits.shape[-1])

    head.forward = forward  # type: ignore[method-assign, assignment]


def _is_close(
    product: Callable[[Tensor], Tensor], head: nn.Linear, rows: Tensor, tolerance: float
) -> bool:
    # Not a number is no small difference.
    return relative_error(product(rows), head(rows)) <= tolerance


def _has_same_largest(probe: Probe, *, is_rounded: bool) -> bool:
    try:
        expected = probe.logits_now() if is_rounded else probe.logits
        largest = probe.largest_logits_now()
    except (RuntimeError, ValueError, IndexError):
        return False
    if isinstance(largest, Tensor):
        return False
    best = expected.max(dim=-1).values
    spread = expected.std(dim=-1)
    # A tie within rounding is no other choice. Not a number is no small difference.
    chosen = expected.gather(-1, largest.token_ids[:, None])[:, 0]
    is_close = (chosen - best).abs() <= TOLERANCE * spread
    is_same = (largest.values - best).abs() <= 10 * TOLERANCE * spread
    return bool((is_close & is_same).all())
