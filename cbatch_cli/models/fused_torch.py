"""The operations of fused layers by plain torch, on any device and in any dtype."""

from __future__ import annotations

import math

import torch
from cbatch_kernels.cpu_layers import Activation
from cbatch_kernels.cpu_linear import TorchLinear
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor
from torch.nn.functional import gelu, silu

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.fused_norm import Norm, NormStep
from cbatch_cli.models.fused_operations import (
    ActivationStep,
    AddStep,
    HeadNorms,
    HeadsStep,
    OperationsName,
    Rotation,
    query_and_key_heads,
)


class TorchOperations:
    """`LayerOperations` of torch's own."""

    name: OperationsName = "torch"
    keeps_weights = True

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """torch's product."""
        return TorchLinear(weight, bias)

    def norm(self, norm: Norm) -> NormStep:
        """Four operations, five where values are rounded before the weight."""
        return _NormStep(norm, norm.weight if norm.offset == 0.0 else norm.factor)

    def add(self, *, added_norm: Norm | None, norm: Norm | None, owns_residual: bool) -> AddStep:
        """One operation beside those of the norms."""
        norm_added = None if added_norm is None else self.norm(added_norm)
        norm_sum = None if norm is None else self.norm(norm)

        def step(residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
            if norm_added is not None:
                added = norm_added(added)
            total = added.add_(residual)
            return total, total if norm_sum is None else norm_sum(total)

        return step

    def heads(self, spec: LayerSpec, *, norms: HeadNorms | None, rotation: Rotation) -> HeadsStep:
        """Queries and keys together: five operations at most, and those of one norm."""
        norm_heads = None if norms is None else _head_norm_step(spec, norms)

        def step(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
            heads = query_and_key_heads(spec, qkv)
            if norm_heads is not None:
                heads = norm_heads(heads)
            return heads if rotation == "none" else _rotated(heads, cosines, sines, rotation)

        return step

    def activation(self, activation: Activation) -> ActivationStep:
        """Two operations."""

        def step(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            activated = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
            return activated.mul_(up)

        return step


class _NormStep:
    """Multiplies rows by `weight`, `[D]` or one for each row of the last two dimensions."""

    def __init__(self, norm: Norm, weight: Tensor) -> None:
        self._rounds_before_weight = norm.rounds_before_weight
        dim = weight.shape[-1]
        # A row's length over the root of D is its root mean square.
        length_scale, weight_scale = 1.0, math.sqrt(dim)
        if norm.rounds_before_weight:
            length_scale, weight_scale = 1.0 / weight_scale, 1.0
        self._length_scale = length_scale
        least = math.sqrt(norm.epsilon * dim) * length_scale
        self._least_length = torch.tensor(least, device=weight.device)
        self._weight = weight if norm.rounds_before_weight else weight.float() * weight_scale

    def __call__(self, states: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        output = torch.empty_like(states, memory_format=torch.contiguous_format)
        if self._rounds_before_weight:
            lengths.mul_(self._length_scale).hypot_(self._least_length)
            return torch.div(states, lengths, out=output).mul_(self._weight)
        return torch.mul(states / lengths.hypot_(self._least_length), self._weight, out=output)


def _head_norm_step(spec: LayerSpec, norms: HeadNorms) -> NormStep:
    query_norm, key_norm = norms
    weights = [
        (norm.weight if norm.offset == 0.0 else norm.factor).expand(num_heads, -1)
        for norm, num_heads in ((query_norm, spec.num_heads), (key_norm, spec.num_kv_heads))
    ]
    return _NormStep(query_norm, torch.cat(weights))


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, rotation: Rotation) -> Tensor:
    num_pairs = cosines.shape[-1] // 2
    cosines, sines = cosines[:, None, :num_pairs], sines[:, None, :num_pairs]
    output = torch.empty_like(heads, memory_format=torch.contiguous_format)
    first, second = _pairs(heads, num_pairs, rotation)
    first_out, second_out = _pairs(output, num_pairs, rotation)
    torch.mul(first, cosines, out=first_out).addcmul_(second, sines, value=-1.0)
    torch.mul(second, cosines, out=second_out).addcmul_(first, sines)
    if 2 * num_pairs < heads.shape[-1]:
        output[..., 2 * num_pairs :] = heads[..., 2 * num_pairs :]
    return output


def _pairs(heads: Tensor, num_pairs: int, rotation: Rotation) -> tuple[Tensor, Tensor]:
    if rotation == "pairs":
        return heads[..., : 2 * num_pairs : 2], heads[..., 1 : 2 * num_pairs : 2]
    return heads[..., :num_pairs], heads[..., num_pairs : 2 * num_pairs]
