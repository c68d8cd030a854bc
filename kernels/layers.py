"""The elementwise layers around attention: norm, rotary positions, gated activation."""

from __future__ import annotations

from typing import Literal

from cbatch_kernels.checks import FLOAT_DTYPES, Shapes, check_dtype, check_positive
from cbatch_kernels.tiles import COMPILE_OPTIONS, next_power_of_2
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]

_ELEMENTS_PER_PROGRAM = 2048
_MAX_NORM_DIM = 65536


def rms_norm(
    states: Tensor,
    weight: Tensor,
    output: Tensor,
    *,
    eps: float,
    round_before_weight: bool,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
) -> None:
    """Root-mean-square norm of `states` `[A, B, D]` or `[A, D]` into `output` of its shape.

    Llama rounds to the output's dtype before it multiplies by `weight` `[D]`, Gemma after, and
    Gemma adds a `weight_offset` of 1. With `residual`, of the states' shape, states are added to
    it in place first, and the norm is that of the sum. Raises `ValueError` for a tensor that does
    not fit.
    """
    shapes = Shapes()
    layout = "A B D" if states.dim() == 3 else "A D"
    shapes.check("states", states, layout)
    shapes.check("weight", weight, "D")
    shapes.check("output", output, layout)
    check_dtype("states", states, FLOAT_DTYPES)
    check_dtype("weight", weight, FLOAT_DTYPES)
    check_dtype("output", output, (states.dtype,))
    check_positive("eps", eps)
    if residual is not None:
        shapes.check("residual", residual, layout)
        check_dtype("residual", residual, (states.dtype,))
    if shapes["D"] > _MAX_NORM_DIM:
        raise ValueError(f"D is {shapes['D']}; the kernel goes up to {_MAX_NORM_DIM}")
    num_inner = shapes["B"] if states.dim() == 3 else 1
    num_rows = shapes["A"] * num_inner
    if num_rows == 0:
        return
    from cbatch_kernels.layers_jit import rms_norm_kernel

    block_dim = next_power_of_2(shapes["D"])
    block_rows = max(1, _ELEMENTS_PER_PROGRAM // block_dim)
    rest = states if residual is None else residual
    rms_norm_kernel[(-(-num_rows // block_rows),)](
        output,
        states,
        rest,
        weight,
        eps,
        weight_offset,
        num_rows,
        *_row_strides(output),
        *_row_strides(states),
        *_row_strides(rest),
        NUM_INNER=num_inner,
        DIM=shapes["D"],
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        ROUND_BEFORE_WEIGHT=round_before_weight,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(4, block_dim // 512)),
        **COMPILE_OPTIONS,
    )


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
) -> None:
    """Rotate queries `[T, H, D]` and keys `[T, KV, D]` in place.

    `cos` and `sin` are `[T, R]`: the angles of R pairs, with 2R not above D; dimensions from 2R on
    are left as they are. A pair is (i, i + R), or (2i, 2i + 1) if interleaved. Raises `ValueError`
    for a tensor that does not fit.
    """
    shapes = Shapes()
    shapes.check("query", query, "T H D")
    shapes.check("key", key, "T KV D")
    shapes.check("cos", cos, "T R")
    shapes.check("sin", sin, "T R")
    check_dtype("query", query, FLOAT_DTYPES)
    check_dtype("key", key, (query.dtype,))
    check_dtype("cos", cos, FLOAT_DTYPES)
    check_dtype("sin", sin, (cos.dtype,))
    half = shapes["R"]
    if 2 * half > shapes["D"]:
        raise ValueError(f"cos has {half} pairs; a head of dimension {shapes['D']} has fewer")
    if shapes["T"] == 0 or half == 0:
        return
    from cbatch_kernels.layers_jit import rope_kernel

    block_half = next_power_of_2(half)
    block_heads = min(
        next_power_of_2(max(shapes["H"], shapes["KV"])),
        max(1, _ELEMENTS_PER_PROGRAM // 2 // block_half),
    )
    head_blocks = -(-shapes["H"] // block_heads) + -(-shapes["KV"] // block_heads)
    rope_kernel[shapes["T"], head_blocks](
        query,
        key,
        cos,
        sin,
        *query.stride()[:2],
        *key.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        NUM_HEADS=shapes["H"],
        NUM_KV_HEADS=shapes["KV"],
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        IS_INTERLEAVED=is_interleaved,
        **COMPILE_OPTIONS,
    )


def act_and_mul(gate: Tensor, up: Tensor, output: Tensor, *, activation: Activation) -> None:
    """Activation of `gate` times `up` into `output`, all `[T, D]`, rounded as models do.

    Gate and up may be the two halves of one tensor. Raises `ValueError` for a tensor that does not
    fit.
    """
    shapes = Shapes()
    shapes.check("gate", gate, "T D")
    shapes.check("up", up, "T D")
    shapes.check("output", output, "T D")
    check_dtype("gate", gate, FLOAT_DTYPES)
    check_dtype("up", up, (gate.dtype,))
    check_dtype("output", output, (gate.dtype,))
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}; it should be 'silu' or 'gelu_tanh'")
    if gate.numel() == 0:
        return
    from cbatch_kernels.layers_jit import act_and_mul_kernel

    block = min(_ELEMENTS_PER_PROGRAM, next_power_of_2(shapes["D"]))
    act_and_mul_kernel[shapes["T"], -(-shapes["D"] // block)](
        output,
        gate,
        up,
        output.stride(0),
        gate.stride(0),
        up.stride(0),
        DIM=shapes["D"],
        BLOCK=block,
        IS_GELU=activation == "gelu_tanh",
        **COMPILE_OPTIONS,
    )


def _row_strides(tensor: Tensor) -> tuple[int, int]:
    return (tensor.stride(0), tensor.stride(1)) if tensor.dim() == 3 else (tensor.stride(0), 0)
