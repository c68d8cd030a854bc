"""Triton code of the KV cache writes; imports triton, so import it only to launch."""

import triton
import triton.language as tl


@triton.jit
def _quantise(states, inverse_scale, fp8_max, IS_FP8: tl.constexpr):
    """States as the cache holds them; out of range saturates, NaN stays NaN."""
    if IS_FP8:
        scaled = states.to(tl.float32) * inverse_scale
        scaled = tl.where(scaled > fp8_max, fp8_max, scaled)
        states = tl.where(scaled < -fp8_max, -fp8_max, scaled)
    return states


@triton.jit
def store_kv_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    inverse_k_scale,
    inverse_v_scale,
    fp8_max,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Grid (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    value_dims = tl.arange(0, BLOCK_DV)[None, :]

    k_mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=k_mask)
    k = _quantise(k, inverse_k_scale, fp8_max, IS_FP8)
    k_base = k_cache + block * k_block_stride + offset * k_slot_stride
    tl.store(k_base + heads * k_head_stride + dims, k.to(k_cache.dtype.element_ty), mask=k_mask)

    v_mask = (heads < NUM_KV_HEADS) & (value_dims < VALUE_HEAD_DIM)
    v_source = value + token * value_token_stride + heads * value_head_stride
    v = tl.load(v_source + value_dims, mask=v_mask)
    v = _quantise(v, inverse_v_scale, fp8_max, IS_FP8)
    v_base = v_cache + block * v_block_stride + offset * v_slot_stride
    v_target = v_base + heads * v_head_stride + value_dims
    tl.store(v_target, v.to(v_cache.dtype.element_ty), mask=v_mask)
