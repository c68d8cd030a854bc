"""Replaces a model's product with its vocabulary on a CPU, where numbers show no difference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cbatch_kernels.cpu_head import VocabularyHead
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, choose_linear, rounds_weights
from torch import Tensor, nn

from cbatch_cli.models.fusion_probe import ROUNDED_TOLERANCE, TOLERANCE, relative_error
from cbatch_cli.models.hf_model import HFModel


@torch.inference_mode()
def fuse_head(
    model: HFModel,
    *,
    mode: LinearMode,
    kernels: CPUKernels,
    largest_logits: Callable[[], tuple[Tensor, Tensor]],
) -> str | None:
    """Replace the output head of `model` in place; returns the kind that replaces it, or None.

    `largest_logits` gives logits of some tokens as they were before, and of the same tokens from
    a forward pass that is asked for the largest ones alone.
    """
    head = model.module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    weight = head.weight.detach()
    if not rounds_weights(mode) and head.bias is None:
        vocabulary = VocabularyHead(weight, mode=mode, kernels=kernels)

        def product(rows: Tensor) -> Tensor:
            if model.only_largest:
                return vocabulary.largest_logits(rows)
            return vocabulary.all_logits(rows)

        own_forward = head.forward
        _replace_product(head, product)
        # What follows the product, a cap or a scale, could put another logit first.
        if _have_same_largest(*largest_logits()):
            return "two_stage"
        head.forward = own_forward
    linear = choose_linear(
        weight, None if head.bias is None else head.bias.detach(), mode=mode, kernels=kernels
    )
    rows = torch.randn(3, head.in_features, generator=torch.Generator().manual_seed(0))
    tolerance = ROUNDED_TOLERANCE if rounds_weights(mode) else TOLERANCE
    if not relative_error(linear(rows), head(rows)) <= tolerance:
        return None

    _replace_product(head, linear)
    kind: str = linear.kind
    return kind


def _replace_product(head: nn.Linear, product: Callable[[Tensor], Tensor]) -> None:
    """Have `head` multiply by `product`, which takes rows `[T, K]`."""

    def forward(hidden_states: Tensor) -> Tensor:
        logits = product(hidden_states.flatten(0, -2))
        return logits.view(*hidden_states.shape[:-1], head.out_features)

    head.forward = forward  # type: ignore[method-assign, assignment]


def _have_same_largest(expected: Tensor, actual: Tensor) -> bool:
    ids = actual.argmax(dim=-1, keepdim=True)
    best = expected.max(dim=-1, keepdim=True).values
    spread = expected.std(dim=-1, keepdim=True)
    # A tie within rounding is no other choice. Not a number is no small difference.
    is_close = (expected.gather(-1, ids) - best).abs() <= TOLERANCE * spread
    is_same = (actual.gather(-1, ids) - best).abs() <= 10 * TOLERANCE * spread
    return bool((is_close & is_same).all())
