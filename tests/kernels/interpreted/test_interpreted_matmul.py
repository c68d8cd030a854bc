"""The linear layer, interpreted: against float64, and a row's bits in every batch."""

from __future__ import annotations

import math

import torch
from cbatch_kernels import reference
from cbatch_kernels.matmul import linear
from cbatch_kernels.tiles import MatmulTiles, matmul_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.interpreted.matmul_checks import (
    SMALL_TILES,
    check_linear,
    check_rows_in_every_batch,
    random,
)

drawn = settings(deadline=None, derandomize=True, database=None)


@settings(drawn, max_examples=40)
@given(
    num_rows=st.integers(1, 70),
    in_dim=st.integers(1, 200) | st.sampled_from([16, 32, 48, 64]),
    out_dim=st.integers(1, 100),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    block_m=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**32),
)
def test_against_float64(
    num_rows: int,
    in_dim: int,
    out_dim: int,
    has_bias: bool,
    dtype: torch.dtype,
    block_m: int,
    seed: int,
) -> None:
    tiles = MatmulTiles(block_m=block_m, block_n=32, block_k=16, num_warps=4, num_stages=1)
    check_linear(num_rows, in_dim, out_dim, has_bias=has_bias, dtype=dtype, tiles=tiles, seed=seed)


def test_the_tiles_of_real_cards() -> None:
    for arch in ("sm_80", "sm_90", "gfx942"):
        for dtype in (torch.float32, torch.bfloat16):
            tiles = matmul_tiles(arch, dtype)
            check_linear(130, 96, 70, has_bias=True, dtype=dtype, tiles=tiles)


@settings(drawn, max_examples=15)
@given(
    num_rows=st.integers(1, 60),
    num_before=st.integers(0, 40),
    num_after=st.integers(0, 40),
    in_dim=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_have_the_same_bits_in_every_batch(
    num_rows: int, num_before: int, num_after: int, in_dim: int, dtype: torch.dtype
) -> None:
    check_rows_in_every_batch(num_rows, num_before, num_after, in_dim=in_dim, dtype=dtype)


def test_a_weight_that_is_part_of_a_larger_one() -> None:
    merged, states = random(64, 48), random(20, 32, seed=1)
    output = torch.full((20, 24), math.nan)
    linear(states, merged[8:32, 16:], output, tiles=SMALL_TILES)
    expected: Tensor = reference.linear(states.double(), merged[8:32, 16:].double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
