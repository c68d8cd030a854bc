"""The operations of fused layers by compiled CPU kernels, in float32."""

from __future__ import annotations

import torch
from cbatch_kernels import cpu_layers
from cbatch_kernels.cpu_layers import Activation
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, choose_linear
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.fused_norm import Norm, NormStep, NotFusable
from cbatch_cli.models.fused_operations import (
    ActivationStep,
    AddStep,
    HeadNorms,
    HeadsStep,
    OperationsName,
    Rotation,
    query_and_key_heads,
)


class CompiledOperations:
    """`LayerOperations` of `kernels`; linear layers have their weights packed, see `mode`."""

    name: OperationsName = "compiled"
    keeps_weights = False

    def __init__(self, kernels: CPUKernels, mode: LinearMode) -> None:
        self.kernels = kernels
        self._mode = mode

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A product of the kind that the mode says."""
        return choose_linear(weight, bias, mode=self._mode, kernels=self.kernels)

    def norm(self, norm: Norm) -> NormStep:
        """One pass over the rows."""
        prepared = _prepared(norm)

        def step(states: Tensor) -> Tensor:
            rows = states.reshape(-1, states.shape[-1]).contiguous()
            out = torch.empty_like(rows)
            cpu_layers.add_norm(self.kernels, rows, norm=prepared, out=out)
            return out.view(states.shape)

        return step

    def add(self, *, added_norm: Norm | None, norm: Norm | None, owns_residual: bool) -> AddStep:
        """One pass over both."""
        prepared_added, prepared = _prepared(added_norm), _prepared(norm)

        def step(residual: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
            if added_norm is None:
                total, other = added, residual
            else:
                total, other = residual if owns_residual else residual.clone(), added
            out = None if norm is None else torch.empty_like(total)
            cpu_layers.add_norm(
                self.kernels, total, added=other, added_norm=prepared_added, norm=prepared, out=out
            )
            return total, total if out is None else out

        return step

    def heads(self, spec: LayerSpec, *, norms: HeadNorms | None, rotation: Rotation) -> HeadsStep:
        """One pass over queries and keys, in place."""
        if rotation == "pairs":
            raise NotFusable("it rotates neighbours in pairs")
        query_weight, key_weight = (None, None) if norms is None else [n.factor for n in norms]

        def step(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
            heads = query_and_key_heads(spec, qkv)
            if rotation == "none":
                cosines, sines = cosines[:, :0], sines[:, :0]
            cpu_layers.norm_rope(
                self.kernels,
                heads,
                num_query_heads=spec.num_heads,
                query_weight=query_weight,
                key_weight=key_weight,
                epsilon=0.0 if norms is None else norms[0].epsilon,
                cosines=cosines,
                sines=sines,
            )
            return heads

        return step

    def activation(self, activation: Activation) -> ActivationStep:
        """One pass."""

        def step(gate_up: Tensor) -> Tensor:
            out: Tensor = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            cpu_layers.activate_and_multiply(self.kernels, gate_up, activation=activation, out=out)
            return out

        return step


def _prepared(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.factor, norm.epsilon)
