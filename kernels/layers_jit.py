"""Triton code of the layers around attention; imports triton, so import it only to launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    output,
    states,
    residual,
    weight,
    eps,
    weight_offset,
    num_rows,
    output_outer_stride,
    output_inner_stride,
    states_outer_stride,
    states_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    NUM_INNER: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Grid (blocks of rows); row r is `[r // NUM_INNER, r % NUM_INNER]` of the tensors."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outer, inner = rows // NUM_INNER, rows % NUM_INNER
    dims = tl.arange(0, BLOCK_DIM)
    mask = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    states_rows = states + outer * states_outer_stride + inner * states_inner_stride
    x = tl.load(states_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_rows = residual + outer * residual_outer_stride + inner * residual_inner_stride
        residual_ptrs = residual_rows[:, None] + dims[None, :]
        x += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        total = x.to(residual.dtype.element_ty)
        tl.store(residual_ptrs, total, mask=mask)
        # The norm is that of the sum as it is stored.
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / DIM
    normed = x * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    if ROUND_BEFORE_WEIGHT:
        normed = normed.to(output.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32) + weight_offset
    output_rows = output + outer * output_outer_stride + inner * output_inner_stride
    result = (normed * factor[None, :]).to(output.dtype.element_ty)
    tl.store(output_rows[:, None] + dims[None, :], result, mask=mask)


@triton.jit
def _rotate(
    states,
    token,
    heads,
    cos,
    sin,
    pairs,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    if IS_INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, pairs + HALF
    mask = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
    rows = states + token * token_stride + heads * head_stride
    first_ptrs = rows[:, None] + first[None, :]
    second_ptrs = rows[:, None] + second[None, :]
    x = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(second_ptrs, mask=mask, other=0.0).to(tl.float32)
    dtype = states.dtype.element_ty
    tl.store(first_ptrs, (x * cos[None, :] - y * sin[None, :]).to(dtype), mask=mask)
    tl.store(second_ptrs, (y * cos[None, :] + x * sin[None, :]).to(dtype), mask=mask)


@triton.jit
def rope_kernel(
    query,
    key,
    cos,
    sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Grid (tokens, blocks of query heads followed by blocks of key heads); in place."""
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    pairs = tl.arange(0, BLOCK_HALF)
    pair_mask = pairs < HALF
    c = tl.load(cos + token * cos_stride + pairs, mask=pair_mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + pairs, mask=pair_mask, other=0.0).to(tl.float32)
    if head_block < QUERY_BLOCKS:
        heads = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate(
            query, token, heads, c, s, pairs, query_token_stride, query_head_stride,
            NUM_HEADS, HALF, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        heads = (head_block - QUERY_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate(
            key, token, heads, c, s, pairs, key_token_stride, key_head_stride,
            NUM_KV_HEADS, HALF, IS_INTERLEAVED,
        )  # fmt: skip


@triton.jit
def act_and_mul_kernel(
    output,
    gate,
    up,
    output_stride,
    gate_stride,
    up_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Grid (tokens, blocks of dimensions)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = dims < DIM
    x = tl.load(gate + token * gate_stride + dims, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # 0.5 * (1 + tanh(y)) is the logistic function of 2y.
        activated = x / (1.0 + tl.exp(-2.0 * inner))
    else:
        activated = x / (1.0 + tl.exp(-x))
    dtype = output.dtype.element_ty
    # Models round the activation before they multiply.
    activated = activated.to(dtype).to(tl.float32)
    y = tl.load(up + token * up_stride + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * output_stride + dims, (activated * y).to(dtype), mask=mask)
