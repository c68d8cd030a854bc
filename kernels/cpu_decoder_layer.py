"""A decoder layer on a CPU as one call of the compiled kernels, in float32.

What the calls of single kernels cost in Python is more than some of the kernels themselves.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from cbatch_kernels.cpu_layers import ACTIVATIONS, Activation
from cbatch_kernels.cpu_library import (
    AttentionArguments,
    CPUKernels,
    LayerArguments,
    NormArguments,
    address,
)
from cbatch_kernels.cpu_packed import OwnLinear
from torch import Tensor

Norm = tuple[Tensor, float]
"""Weight `[D]` float32, which the normed values are multiplied by, and epsilon."""


class Workspace:
    """Memory for what layers compute on the way, one after another; it grows with the steps."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def address_of(self, num_floats: int) -> int:
        """Where as many float32 have room until the next call."""
        if self._memory.numel() < num_floats:
            self._memory = torch.empty(num_floats)
        return self._memory.data_ptr()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """What a decoder layer is made of; a norm that is None norms nothing."""

    input_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    post_attention_norm: Norm | None
    pre_mlp_norm: Norm
    post_mlp_norm: Norm | None
    qkv: OwnLinear
    output: OwnLinear
    gate_up: OwnLinear
    down: OwnLinear
    activation: Activation
    rotates: bool


class DecoderLayer:
    """Packed tokens `[T, C]` through a whole layer, attention included."""

    def __init__(self, kernels: CPUKernels, weights: LayerWeights, workspace: Workspace) -> None:
        self.kernels, self.workspace, self.rotates = kernels, workspace, weights.rotates
        self._weights = weights
        self.arguments = LayerArguments(
            dim=weights.output.num_columns,
            activation=ACTIVATIONS[weights.activation],
            input_norm=_norm(weights.input_norm),
            query_norm=_norm(weights.query_norm),
            key_norm=_norm(weights.key_norm),
            post_attention_norm=_norm(weights.post_attention_norm),
            pre_mlp_norm=_norm(weights.pre_mlp_norm),
            post_mlp_norm=_norm(weights.post_mlp_norm),
            qkv=weights.qkv.arguments(),
            output=weights.output.arguments(),
            gate_up=weights.gate_up.arguments(),
            down=weights.down.arguments(),
        )

    def __call__(
        self,
        hidden_states: Tensor,
        cosines: Tensor,
        sines: Tensor,
        attention: AttentionArguments,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`[T, C]` to a new tensor of that shape.

        `cosines` and `sines` are `[T, R]`, and `attention` holds the step's layout and the cache.
        Raises `ValueError` for what is not contiguous float32.
        """
        check_rows(hidden_states, cosines, sines)
        num_tokens = len(hidden_states)
        output = torch.empty_like(hidden_states)
        arguments = self.arguments
        num_floats = num_workspace_floats(num_tokens, self.row_sizes(attention))
        arguments.hidden_states = hidden_states.data_ptr()
        arguments.residual = output.data_ptr()
        arguments.workspace = self.workspace.address_of(num_floats)
        arguments.cosines, arguments.sines = cosines.data_ptr(), sines.data_ptr()
        arguments.rotary_dim = cosines.shape[1] if self.rotates else 0
        arguments.attention = attention
        arguments.attention.scale = scale
        arguments.attention.softcap = softcap or 0.0
        arguments.attention.sinks = address(sinks)
        arguments.attention.num_tokens = arguments.num_rows = num_tokens
        self.kernels.decoder_layer(ctypes.addressof(arguments))
        return output

    def row_sizes(self, attention: AttentionArguments) -> tuple[int, ...]:
        """Floats per token of each part of the workspace."""
        weights = self._weights
        dim = weights.output.num_columns
        attended = attention.num_heads * attention.value_head_dim
        return (
            *(dim, dim, weights.qkv.num_columns, attended, attended),
            *(weights.gate_up.num_columns, weights.down.depth),
        )


def num_workspace_floats(num_tokens: int, row_sizes: tuple[int, ...]) -> int:
    """Floats of a workspace whose parts, of so many floats a token, start on a cache line each."""
    return sum(-(-num_tokens * size // 16) * 16 for size in row_sizes)


def check_rows(*tensors: Tensor) -> None:
    """Raise `ValueError` for what is not contiguous float32."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is not contiguous float32")


def _norm(norm: Norm | None) -> NormArguments:
    weight, epsilon = norm or (None, 0.0)
    return NormArguments(weight=address(weight), epsilon=epsilon)
