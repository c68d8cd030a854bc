"""Runs the linear layer's kernel on guarded, poisoned tensors and compares."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from cbatch_kernels import reference
from cbatch_kernels.matmul import linear
from cbatch_kernels.tiles import MatmulTiles
from torch import Tensor

from tests.kernels.interpreted.guarded import guarded

SMALL_TILES = MatmulTiles(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=1)

# Relative, root mean square, of an output row.
_TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def check_linear(
    num_rows: int,
    in_dim: int,
    out_dim: int,
    *,
    has_bias: bool,
    dtype: torch.dtype,
    tiles: MatmulTiles = SMALL_TILES,
    seed: int = 0,
) -> None:
    """Random tensors behind which no memory is, against float64."""
    states = guarded(random(num_rows, in_dim, dtype=dtype, seed=seed))
    weight = guarded(random(out_dim, in_dim, dtype=dtype, seed=seed + 1))
    bias = guarded(4 * random(out_dim, dtype=dtype, seed=seed + 2)) if has_bias else None
    output = torch.full((num_rows + 1, out_dim), math.nan, dtype=dtype)
    linear(states, weight, output[:num_rows], bias=bias, tiles=tiles)
    expected = reference.linear(
        states.double(), weight.double(), bias=None if bias is None else bias.double()
    )
    assert output[num_rows].isnan().all(), "written past the last row"
    difference = (output[:num_rows].double() - expected).norm(dim=-1)
    scale = states.double().norm(dim=-1) * weight.double().norm() / math.sqrt(in_dim)
    if bias is not None:
        scale = scale + bias.double().norm()
    assert bool((difference <= _TOLERANCES[dtype] * scale).all()), float(difference.max())


def check_weights_more_than_2_31_elements_apart(folder: Path) -> None:
    """Rows of weights in a file that is a hole between them."""
    stride, in_dim, num_rows = 2**30, 16, 3
    path = folder / "weight"
    with path.open("wb") as file:
        file.truncate(2 * num_rows * stride)
    flat = torch.from_file(str(path), shared=True, size=num_rows * stride, dtype=torch.float16)
    weight = flat.view(num_rows, stride)[:, :in_dim]
    weight.copy_(random(num_rows, in_dim, dtype=torch.float16))
    states, outputs = random(3, in_dim, dtype=torch.float16, seed=1), []
    for tensor in (weight, weight.contiguous()):
        outputs.append(torch.full((3, num_rows), math.nan, dtype=torch.float16))
        linear(states, tensor, outputs[-1], tiles=SMALL_TILES)
    assert torch.equal(*outputs)


def check_rows_in_every_batch(
    num_rows: int, num_before: int, num_after: int, *, in_dim: int, dtype: torch.dtype
) -> None:
    """Rows alone, behind and before others, and beside NaN, as padding may hold: the same bits."""
    weight, states = random(40, in_dim, dtype=dtype), random(num_rows, in_dim, dtype=dtype, seed=1)
    alone = torch.full((num_rows, 40), math.nan, dtype=dtype)
    linear(states, weight, alone, tiles=SMALL_TILES)
    before = random(num_before, in_dim, dtype=dtype, seed=2)
    padding = torch.full((num_after, in_dim), math.nan, dtype=dtype)
    together = torch.full((num_before + num_rows + num_after, 40), math.nan, dtype=dtype)
    linear(torch.cat([before, states, padding]), weight, together, tiles=SMALL_TILES)
    assert torch.equal(together[num_before : num_before + num_rows], alone)
