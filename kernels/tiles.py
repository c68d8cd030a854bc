"""Tile sizes of the attention kernels by architecture: a plain table, no tuning at run time.

Tuning at run time needs a driver, makes the first steps slow, and cannot happen while a CUDA
graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

AttentionKind = Literal["prefill", "decode"]

_HOPPER_AND_LATER = ("sm_90", "sm_100", "sm_103")


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
    kind: AttentionKind,
    has_window: bool = False,
    num_query_rows: int | None = None,
) -> AttentionTiles:
    """Tiles for `arch`, such as "sm_90" or "gfx942", and the larger of the two head dimensions.

    `num_query_rows` is how many packed rows, queries times heads of a group, a sequence has at
    most: a tile of 16 serves few of them better. None keeps the tile the same for every batch.
    """
    is_wide = head_dim > 128
    if dtype == torch.float32:
        # Exact products of float32 run outside the tensor cores and hold everything in registers.
        if kind == "decode":
            return _tiles(16, 16 if is_wide else 32, 4, 1)
        return _tiles(16 if is_wide else 32, 16 if is_wide else 32, 4 if is_wide else 8, 1)
    if kind == "decode":
        return _tiles(16, 32 if is_wide else 64, 4, 3 if arch != "gfx942" else 1)
    if num_query_rows is not None and num_query_rows <= 16:
        return _tiles(16, 32 if is_wide else 64, 4, 2 if arch != "gfx942" else 1)
    if arch == "gfx942":
        return _tiles(64 if is_wide else 128, 32 if is_wide else 64, 8 if is_wide else 4, 1)
    if arch in _HOPPER_AND_LATER:
        return _tiles(64, 64, 8, 2) if is_wide else _tiles(128, 64, 8, 2)
    if is_wide:
        return _tiles(64, 32, 8, 2)
    return _tiles(64, 64, 4, 2) if has_window else _tiles(128, 64, 8, 2)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def _tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> AttentionTiles:
    return AttentionTiles(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
    )
