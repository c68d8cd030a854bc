"""What a fused layer is made of: a few operations, of which every kind of device has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from cbatch_kernels.cpu_layers import Activation
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.fused_norm import Norm, NormStep

OperationsName = Literal["compiled", "triton", "torch"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of the models whose layers are fused."""

Rotation = Literal["halves", "pairs", "none"]
"""What rotates with value i of a head's first 2R: value i + R, or its neighbour, or nothing."""

HeadNorms = tuple[Norm, Norm]
"""Of queries and of keys, alike but for their weights."""

AddStep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
HeadsStep = Callable[[Tensor, Tensor, Tensor], Tensor]
ActivationStep = Callable[[Tensor], Tensor]


class LayerOperations(Protocol):
    """Makes the steps of fused layers. Every method raises `NotFusable` for what it has not.

    Steps take packed tokens, and write into no tensor but those of which it is said.
    """

    name: OperationsName
    keeps_weights: bool
    """Whether linear layers read the weights where they are, not a copy in another layout."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The product with a weight `[N, K]`: `[T, K]` to `[T, N]`."""

    def norm(self, norm: Norm) -> NormStep:
        """The norm of rows `[..., D]`."""

    def add(self, *, added_norm: Norm | None, norm: Norm | None, owns_residual: bool) -> AddStep:
        """Takes the residual stream `[T, C]` and what `added_norm` norms before it is added.

        Returns the sum and its `norm`; without one, the sum twice. May write into what is added,
        and if the layer owns the residual stream, into that.
        """

    def heads(self, spec: LayerSpec, *, norms: HeadNorms | None, rotation: Rotation) -> HeadsStep:
        """Takes queries, keys and values `[T, (H + KV) D + KV Dv]`, into which it may write.

        With them come cosines and sines `[T, 2R]`, both halves alike. Returns queries and keys
        `[T, H + KV, D]`, normed and then rotated.
        """

    def activation(self, activation: Activation) -> ActivationStep:
        """Takes gate and up `[T, 2C]` side by side; returns activation(gate) * up `[T, C]`."""


def query_and_key_heads(spec: LayerSpec, qkv: Tensor) -> Tensor:
    """Queries and keys `[T, H + KV, D]`, a view of what a layer's projections give."""
    num_heads = spec.num_heads + spec.num_kv_heads
    return qkv[:, : num_heads * spec.head_dim].view(qkv.shape[0], num_heads, spec.head_dim)
