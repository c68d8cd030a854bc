"""Triton code of the linear layer; imports triton, so import it only to launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    output,
    states,
    weight,
    bias,
    num_rows,
    weight_stride,
    IN_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (blocks of rows, blocks of output features); states and output are contiguous.

    One program sums all products of its outputs, in ascending order of the input features. The
    blocks of rows that share weights run side by side.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    feature_mask = features < OUT_DIM
    inner = tl.arange(0, BLOCK_K)
    states_ptrs = states + rows[:, None] * IN_DIM + inner[None, :]
    weight_ptrs = weight + features[None, :] * weight_stride + inner[:, None]
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_DIM, BLOCK_K):
        left = IN_DIM - start
        x = tl.load(states_ptrs, mask=row_mask[:, None] & (inner < left)[None, :], other=0.0)
        w = tl.load(weight_ptrs, mask=feature_mask[None, :] & (inner < left)[:, None], other=0.0)
        accumulator = tl.dot(x, w, accumulator, input_precision="ieee")
        states_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_BIAS:
        accumulator += tl.load(bias + features, mask=feature_mask, other=0.0).to(tl.float32)[
            None, :
        ]
    output_ptrs = output + rows[:, None] * OUT_DIM + features[None, :]
    output_mask = row_mask[:, None] & feature_mask[None, :]
    tl.store(output_ptrs, accumulator.to(output.dtype.element_ty), mask=output_mask)
