"""The operations of fused layers by our Triton kernels, on CUDA and ROCm devices.

On CPU tensors the same code runs under triton's interpreter, for tests. Nothing is read back from
the device, and every shape that varies is that of the tokens.
"""

from __future__ import annotations

import torch
from cbatch_kernels.cpu_linear import TorchLinear
from cbatch_kernels.cpu_packed import Linear
from cbatch_kernels.layers import Activation, act_and_mul, rms_norm, rope
from torch import Tensor

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


class TritonOperations:
    """`LayerOperations` of Triton kernels between torch's products."""

    name: OperationsName = "triton"
    keeps_weights = True

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """torch's product."""
        return TorchLinear(weight, bias)

    def norm(self, norm: Norm) -> NormStep:
        """One launch."""

        def step(states: Tensor) -> Tensor:
            output = torch.empty_like(states, memory_format=torch.contiguous_format)
            _rms_norm(norm, *_rows(states, output))
            return output

        return step

    def add(self, *, added_norm: Norm | None, norm: Norm | None, owns_residual: bool) -> AddStep:
        """One launch, and one more for the norm of what is added."""

        def step(residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
            if added_norm is not None:
                _rms_norm(added_norm, added, added)
            if norm is None:
                total = added.add_(residual)
                return total, total
            output = torch.empty_like(residual)
            # The kernel writes the sum where the second one was, which is the layer's own.
            _rms_norm(norm, residual, output, residual=added)
            return added, output

        return step

    def heads(self, spec: LayerSpec, *, norms: HeadNorms | None, rotation: Rotation) -> HeadsStep:
        """One launch, and one more for each norm; in place."""

        def step(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
            heads = query_and_key_heads(spec, qkv)
            query, key = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
            if norms is not None:
                _rms_norm(norms[0], query, query)
                _rms_norm(norms[1], key, key)
            if rotation != "none":
                num_pairs = cosines.shape[1] // 2
                cosines, sines = cosines[:, :num_pairs], sines[:, :num_pairs]
                rope(query, key, cosines, sines, is_interleaved=rotation == "pairs")
            return heads

        return step

    def activation(self, activation: Activation) -> ActivationStep:
        """One launch."""

        def step(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            output: Tensor = gate_up.new_empty(gate.shape)
            act_and_mul(gate, up, output, activation=activation)
            return output

        return step


def _rms_norm(norm: Norm, states: Tensor, output: Tensor, residual: Tensor | None = None) -> None:
    rms_norm(
        states,
        norm.weight,
        output,
        eps=norm.epsilon,
        round_before_weight=norm.rounds_before_weight,
        weight_offset=norm.offset,
        residual=residual,
    )


def _rows(states: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Both `[..., D]` as `[A, D]`, or as `[A, B, D]` where rows are part of longer ones.

    The kernel is compiled for each B, so that must be the heads and not the tokens.
    """
    dim = states.shape[-1]
    if states.is_contiguous() or states.stride(-1) != 1:
        return states.contiguous().view(-1, dim), output.view(-1, dim)
    while states.dim() > 2 and states.shape[0] == 1:
        states, output = states[0], output[0]
    if states.dim() > 3:
        return states.reshape(-1, dim), output.view(-1, dim)
    if states.dim() == 3 and states.stride(0) < states.stride(1):
        return states.transpose(0, 1), output.transpose(0, 1)
    return states, output
