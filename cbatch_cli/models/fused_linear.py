"""Linear layers on the same input as one product, without a second copy of their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor, nn

from cbatch_cli.models.fused_norm import NotFusable

MakeLinear = Callable[[Sequence[nn.Linear]], Linear]
"""Makes the product of layers on the same input, side by side. Raises `NotFusable`."""


class WeightMerger:
    """Puts the weights of layers of `model` together; not those that other layers use too."""

    def __init__(self, model: nn.Module) -> None:
        users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        # Kept alive, so that no other weight gets the address of one of them.
        self._shared = [weight for weight in model.parameters() if users[id(weight)] > 1]

    def merge(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
        """One weight `[N, K]` and bias `[N]` for layers on the same input.

        The layers' own become views of it, so that their code still works and nothing is kept
        twice. Raises `NotFusable` where that is not so.
        """
        if any(linear.weight is weight for linear in linears for weight in self._shared):
            raise NotFusable("its weights are shared with other layers")
        bias = _merged_bias(linears)
        weight = _common_weight(linears)
        if weight is not None:
            return weight, bias
        weight = torch.cat([linear.weight.detach() for linear in linears])
        own_weights = torch.split(weight, [linear.out_features for linear in linears])
        for linear, own in zip(linears, own_weights, strict=True):
            linear.weight = nn.Parameter(own, requires_grad=False)
        return weight, bias


def release_weights(linears: Sequence[nn.Linear]) -> None:
    """Let go of weights that another copy, in another layout, stands in for."""
    for linear in linears:
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def are_mergeable(linears: Sequence[nn.Linear]) -> bool:
    """Whether these are of one depth, dtype and device."""
    weights = [linear.weight for linear in linears]
    return len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) == 1


class SharedProduct:
    """Stands in for the `forward` of layers that are called one by one with the same tensor.

    The first call computes the product of all, and the others take their columns of it. It is let
    go of when each has taken its own.
    """

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        self._linear = linear
        self._sizes = list(sizes)
        self._hidden: Tensor | None = None
        self._columns: dict[int, Tensor] = {}

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """What replaces the layer at `index`: `[..., K]` to its columns of the product."""

        def forward(hidden: Tensor) -> Tensor:
            if self._hidden is not hidden or index not in self._columns:
                product = self._linear(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
                self._hidden = hidden
                self._columns = dict(enumerate(torch.split(product, self._sizes, dim=-1)))
            columns = self._columns.pop(index)
            if not self._columns:
                self._hidden = None
            return columns

        return forward


def _common_weight(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The merged weight that the layers' weights are views of already, in this order."""
    first = linears[0].weight.detach()
    expected = first.data_ptr()
    for linear in linears:
        if linear.weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if linear.weight.data_ptr() != expected or not linear.weight.is_contiguous():
            return None
        expected += linear.weight.numel() * linear.weight.element_size()
    num_columns = sum(linear.out_features for linear in linears)
    return first.as_strided((num_columns, first.shape[1]), (first.shape[1], 1))


def _merged_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )
