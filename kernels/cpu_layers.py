"""The elementwise parts of a decoder layer on a CPU, in float32 and without copies.

In float32 the two casting orders of RMSNorm are one: pass `weight` as it is for Llama's, and
1 + weight for Gemma's.
"""

from __future__ import annotations

from typing import Literal

import torch
from cbatch_kernels.cpu_library import CPUKernels, address, num_threads
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
"""As kernels/cpu/elementwise.cpp numbers them."""


def add_norm(
    kernels: CPUKernels,
    residual: Tensor,
    *,
    added: Tensor | None = None,
    added_norm: tuple[Tensor, float] | None = None,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
) -> None:
    """Add rows to the residual stream, and norm the sum.

    residual `[T, C]` += `added`, which `added_norm` norms before if given; `out` = `norm` of the
    residual if given. A norm is its weight `[C]` and its epsilon. All rows are contiguous.
    """
    _check(residual, *(tensor for tensor in (added, out) if tensor is not None))
    added_weight, added_epsilon = added_norm or (None, 0.0)
    weight, epsilon = norm or (None, 0.0)
    kernels.add_norm(
        address(added),
        address(added_weight),
        added_epsilon,
        residual.data_ptr(),
        address(weight),
        epsilon,
        address(out),
        residual.shape[0],
        residual.shape[1],
        num_threads(),
    )


def norm_rope(
    kernels: CPUKernels,
    heads: Tensor,
    *,
    num_query_heads: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    cosines: Tensor,
    sines: Tensor,
) -> None:
    """Norm and rotate query and key heads `[T, H, D]` in place; the query heads come first.

    `heads` may be part of longer rows. `cosines` and `sines` are `[T, R]`: the first R values of
    each head are rotated, the lower half with the upper. Weights `[D]` are of an RMSNorm.
    """
    num_tokens, num_heads, head_dim = heads.shape
    _check(cosines, sines)
    if heads.dtype != torch.float32 or heads.stride()[1:] != (head_dim, 1):
        raise ValueError("heads must be float32 and contiguous within a token")
    kernels.norm_rope(
        heads.data_ptr(),
        heads.stride(0),
        num_tokens,
        num_query_heads,
        num_heads,
        head_dim,
        address(query_weight),
        address(key_weight),
        epsilon,
        cosines.data_ptr(),
        sines.data_ptr(),
        cosines.shape[1],
        num_threads(),
    )


def activate_and_multiply(
    kernels: CPUKernels, gate_up: Tensor, *, activation: Activation, out: Tensor
) -> None:
    """`out` `[T, C]` = activation(gate) * up, with `gate_up` `[T, 2 C]` the two side by side."""
    _check(gate_up, out)
    kernels.activate_and_multiply(
        gate_up.data_ptr(),
        out.data_ptr(),
        out.shape[0],
        out.shape[1],
        ACTIVATIONS[activation],
        num_threads(),
    )


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is not contiguous float32")
