"""Tile sizes of attention and products by architecture: a plain table, no tuning at run time.

Tuning at run time needs a driver, makes the first steps slow, and cannot happen while a CUDA
graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

AttentionKind = Literal["prefill", "decode"]

# What triton would choose changes from version to version, and results with it.
COMPILE_OPTIONS = {"enable_fp_fusion": True}

_MAX_SPLITS = 32
_MIN_KEYS_PER_SPLIT = 256
_BLACKWELL = ("sm_100", "sm_103")
_HOPPER_AND_LATER = ("sm_90", *_BLACKWELL)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTiles:
    """How one attention kernel is cut up: M packed query rows by N keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_tiles(
    arch: str,
    *,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    kind: AttentionKind,
    has_window_or_cap: bool = False,
    num_query_rows: int | None = None,
) -> AttentionTiles:
    """Tiles for `arch`, such as "sm_90" or "gfx942", and the larger of the two head dimensions.

    `dtype` is that of queries, `kv_dtype` that of the cache. `num_query_rows` is how many packed
    rows, queries times heads of a group, a sequence has at most: a tile of 16 serves few of them
    better. None keeps the tile the same for every batch. A window or a soft cap takes registers
    that a larger tile would spill, and so does the widening of keys and values of eight bits.
    """
    is_wide = head_dim > 128
    is_widened = kv_dtype.itemsize == 1
    block_n = 32 if has_window_or_cap or is_widened else 64
    if dtype == torch.float32:
        # Exact products of float32 run outside the tensor cores and hold everything in registers.
        if kind == "decode":
            if not is_wide:
                return _tiles(16, 32, 4, 1)
            # In one stage, Blackwell's compiler spills to keep more programs on a processor.
            return _tiles(16, 16, 4, 2 if arch in _BLACKWELL else 1)
        num_warps = 8 if arch in _HOPPER_AND_LATER and not is_wide else 4
        return _tiles(16 if is_wide else 32, 16, num_warps, 1)
    if kind == "decode" or (num_query_rows is not None and num_query_rows <= 16):
        num_stages = 3 if kind == "decode" else 2
        if arch == "gfx942":
            return _tiles(16, 32 if is_wide else 64, 4, 1)
        if is_widened and not is_wide:
            # Half as many keys at a time, and as many bytes on their way.
            return _tiles(16, 32, 4, 2 * num_stages - 1)
        if is_widened and arch in _BLACKWELL:
            # With 4 warps, Blackwell's compiler spills for the same reason as in float32.
            return _tiles(16, 16, 8, num_stages)
        return _tiles(16, 32 if is_wide else 64, 4, num_stages)
    if arch == "gfx942":
        if not is_wide:
            return _tiles(128, 64, 4, 1)
        return _tiles(64, 16 if is_widened and has_window_or_cap else 32, 8, 1)
    if arch in _HOPPER_AND_LATER:
        if not is_wide:
            return _tiles(128, 64, 8, 2)
        return _tiles(64, block_n, 8, 2)
    if is_wide:
        return _tiles(64, 32, 8, 2)
    return _tiles(128, block_n, 8, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTiles:
    """How a product is cut up: M rows by N output features, K input features at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def matmul_tiles(arch: str, dtype: torch.dtype) -> MatmulTiles:
    """Tiles for `arch`, the same for every shape, so that no row's bits depend on it.

    Narrow in output features: with few rows, these alone keep the processors busy.
    """
    if dtype == torch.float32:
        return MatmulTiles(block_m=64, block_n=64, block_k=32, num_warps=8, num_stages=2)
    num_stages = {"gfx942": 2, "sm_80": 3, "sm_86": 3, "sm_89": 3, "sm_120": 3}.get(arch, 4)
    return MatmulTiles(block_m=128, block_n=64, block_k=64, num_warps=4, num_stages=num_stages)


def num_decode_splits(
    *,
    num_seqs: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_processors: int,
    sliding_window: int | None = None,
) -> int:
    """Splits that keep a device of `num_processors` busy twice over, in powers of two."""
    num_keys = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window)
    wanted = 2 * num_processors // max(1, num_seqs * num_kv_heads)
    useful = min(_MAX_SPLITS, num_keys // _MIN_KEYS_PER_SPLIT)
    num_splits = max(1, min(wanted, useful))
    return 1 << (num_splits.bit_length() - 1)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def _tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> AttentionTiles:
    return AttentionTiles(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
    )
