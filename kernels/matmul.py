"""Linear layers in which a row has the same bits whatever rows are multiplied beside it.

Libraries choose tiles, and whether to split the sum, by the number of rows. Here both are the same
for every number of rows, and each output is summed by one program in one order.
"""

from __future__ import annotations

from cbatch_kernels.checks import FLOAT_DTYPES, Shapes, check_dtype
from cbatch_kernels.tiles import COMPILE_OPTIONS, MatmulTiles
from torch import Tensor


def linear(
    states: Tensor,
    weight: Tensor,
    output: Tensor,
    *,
    bias: Tensor | None = None,
    tiles: MatmulTiles,
) -> None:
    """States `[T, I]` times the transposed `weight` `[O, I]`, plus `bias` `[O]`, into `[T, O]`.

    All are of one dtype, and sums are float32. States and output are contiguous. Raises
    `ValueError` for a tensor that does not fit.
    """
    shapes = Shapes()
    shapes.check("states", states, "T I")
    shapes.check("weight", weight, "O I")
    shapes.check("output", output, "T O")
    check_dtype("states", states, FLOAT_DTYPES)
    check_dtype("weight", weight, (states.dtype,))
    check_dtype("output", output, (states.dtype,))
    if bias is not None:
        shapes.check("bias", bias, "O")
        check_dtype("bias", bias, (states.dtype,))
    for name, tensor in (("states", states), ("output", output)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; it should be contiguous")
    if output.numel() == 0:
        return
    from cbatch_kernels.matmul_jit import linear_kernel

    linear_kernel[-(-shapes["T"] // tiles.block_m), -(-shapes["O"] // tiles.block_n)](
        output,
        states,
        weight,
        weight if bias is None else bias,
        shapes["T"],
        weight.stride(0),
        IN_DIM=shapes["I"],
        OUT_DIM=shapes["O"],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        HAS_BIAS=bias is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **COMPILE_OPTIONS,
    )
