"""Writing keys and values into the paged cache."""

from __future__ import annotations

import torch
from cbatch_kernels.checks import FLOAT_DTYPES, FP8_DTYPES, Shapes, check_dtype, check_positive
from cbatch_kernels.tiles import COMPILE_OPTIONS, next_power_of_2
from torch import Tensor

_ELEMENTS_PER_PROGRAM = 2048


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys `[T, KV, D]` and values `[T, KV, Dv]` of T tokens into the caches, in place.

    Caches are `[N, B, KV, D]` and `[N, B, KV, Dv]`: N blocks of B slots, of the keys' dtype or of
    one fp8 dtype; then keys are divided by `k_scale` and values by `v_scale`, and saturate.
    `slot_mapping` int64 `[T]` holds block * B + offset for each token; -1 skips the token.
    Raises `ValueError` for a tensor that does not fit.
    """
    shapes = Shapes()
    shapes.check("key", key, "T KV D")
    shapes.check("value", value, "T KV Dv")
    shapes.check("k_cache", k_cache, "N B KV D")
    shapes.check("v_cache", v_cache, "N B KV Dv")
    shapes.check("slot_mapping", slot_mapping, "T")
    check_dtype("key", key, FLOAT_DTYPES)
    check_dtype("value", value, (key.dtype,))
    check_dtype("k_cache", k_cache, (key.dtype, *FP8_DTYPES))
    check_dtype("v_cache", v_cache, (k_cache.dtype,))
    check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    check_positive("k_scale", k_scale)
    check_positive("v_scale", v_scale)
    if shapes["T"] == 0:
        return
    from cbatch_kernels.kv_store_jit import store_kv_kernel

    block_d, block_dv = next_power_of_2(shapes["D"]), next_power_of_2(shapes["Dv"])
    block_heads = min(
        next_power_of_2(shapes["KV"]), max(1, _ELEMENTS_PER_PROGRAM // max(block_d, block_dv))
    )
    is_fp8 = k_cache.dtype in FP8_DTYPES
    store_kv_kernel[shapes["T"], -(-shapes["KV"] // block_heads)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        1.0 / k_scale,
        1.0 / v_scale,
        torch.finfo(k_cache.dtype).max,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_KV_HEADS=shapes["KV"],
        HEAD_DIM=shapes["D"],
        VALUE_HEAD_DIM=shapes["Dv"],
        BLOCK_SIZE=shapes["B"],
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        IS_FP8=is_fp8,
        **COMPILE_OPTIONS,
    )
