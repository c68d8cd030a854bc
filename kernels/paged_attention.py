"""Attention over the paged KV cache: chunks of prompts, and decoding with split KV."""

from __future__ import annotations

import math

import torch
from cbatch_kernels.checks import FLOAT_DTYPES, FP8_DTYPES, Shapes, check_dtype, check_positive
from cbatch_kernels.tiles import COMPILE_OPTIONS, AttentionTiles, next_power_of_2
from torch import Tensor

MAX_HEAD_DIM = 256
_LOG2_E = 1.0 / math.log(2.0)


def paged_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    *,
    tiles: AttentionTiles,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal attention of packed queries `[T, H, D]` into `output` `[T, H, Dv]`.

    Sequence s owns the queries `query_start_loc[s]` to `query_start_loc[s + 1]` (int32 `[S + 1]`),
    the last of its `seq_lens[s]` (int32 `[S]`) positions; none has more than `max_query_len`.
    Position p lies in block `block_tables[s, p // B]` (int32 `[S, M]`) of the caches
    `[N, B, KV, D]` and `[N, B, KV, Dv]`. `sinks` is `[H]`; fp8 caches hold keys over `k_scale` and
    values over `v_scale`. Rows of `output` that no sequence owns are left as they are. Raises
    `ValueError` for a tensor that does not fit.
    """
    shapes = _check(query, k_cache, v_cache, block_tables, seq_lens, output, sinks, "T")
    shapes.check("query_start_loc", query_start_loc, "S+1")
    if shapes["S+1"] != shapes["S"] + 1:
        raise ValueError(
            f"query_start_loc has {shapes['S+1']} entries; it should have one more than the "
            f"{shapes['S']} of seq_lens"
        )
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    _check_numbers(scale, sliding_window, softcap, k_scale, v_scale)
    group_size = shapes["H"] // shapes["KV"]
    if shapes["S"] == 0 or max_query_len == 0:
        return
    from cbatch_kernels.paged_attention_jit import paged_prefill_kernel

    score_scale, cap_log2 = _score_scales(scale * k_scale, softcap)
    block_m = max(tiles.block_m, next_power_of_2(group_size))
    query_blocks = -(-max_query_len // (block_m // group_size))
    paged_prefill_kernel[query_blocks, shapes["KV"], shapes["S"]](
        output,
        query,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        query if sinks is None else sinks,
        score_scale,
        cap_log2,
        v_scale,
        sliding_window or 0,
        *output.stride()[:2],
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP_SIZE=group_size,
        HEAD_DIM=shapes["D"],
        VALUE_HEAD_DIM=shapes["Dv"],
        BLOCK_SIZE=shapes["B"],
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_head_dim(shapes["D"]),
        BLOCK_DV=padded_head_dim(shapes["Dv"]),
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **COMPILE_OPTIONS,
    )


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    *,
    tiles: AttentionTiles,
    num_splits: int,
    split_size: int | None = None,
    partials: Tensor | None = None,
    lse: Tensor | None = None,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Attention of one query per sequence, `[S, H, D]`, into `output` `[S, H, Dv]`.

    The query is the last of the `seq_lens[s]` positions; a sequence of length 0 gives zeros. Keys
    are shared out over `num_splits` programs. With `split_size` splits lie at multiples of that
    many positions, so that a row's result is bitwise the same in every batch; there must be
    enough of them (`num_decode_splits`). The workspaces `partials` and `lse`, float32 with at
    least S*H*NS*Dv and S*H*NS elements, are needed unless one split without `split_size` does it
    all. The rest is as for `paged_prefill`.
    """
    shapes = _check(query, k_cache, v_cache, block_tables, seq_lens, output, sinks, "S")
    _check_numbers(scale, sliding_window, softcap, k_scale, v_scale)
    check_positive("num_splits", num_splits)
    check_positive("split_size", split_size)
    if split_size is not None and split_size % tiles.block_n:
        raise ValueError(
            f"split_size is {split_size}; it should be a multiple of the {tiles.block_n} keys of "
            "a tile"
        )
    num_heads, value_head_dim = shapes["H"], shapes["Dv"]
    group_size = num_heads // shapes["KV"]
    is_partial = num_splits > 1 or split_size is not None
    if is_partial:
        num_partials = shapes["S"] * num_heads * num_splits
        partials = _workspace("partials", partials, num_partials * value_head_dim, query)
        lse = _workspace("lse", lse, num_partials, query)
    if shapes["S"] == 0:
        return
    from cbatch_kernels.paged_attention_jit import (
        paged_decode_reduce_kernel,
        paged_decode_split_kernel,
    )

    score_scale, cap_log2 = _score_scales(scale * k_scale, softcap)
    block_dv = padded_head_dim(value_head_dim)
    paged_decode_split_kernel[shapes["S"], shapes["KV"], num_splits](
        partials if is_partial else output,
        lse if is_partial else output,
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query if sinks is None else sinks,
        score_scale,
        cap_log2,
        v_scale,
        sliding_window or 0,
        *output.stride()[:2],
        *query.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP_SIZE=group_size,
        HEAD_DIM=shapes["D"],
        VALUE_HEAD_DIM=value_head_dim,
        BLOCK_SIZE=shapes["B"],
        BLOCK_M=max(tiles.block_m, next_power_of_2(group_size)),
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_head_dim(shapes["D"]),
        BLOCK_DV=block_dv,
        SPLIT_SIZE=split_size or 0,
        IS_PARTIAL=is_partial,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **COMPILE_OPTIONS,
    )
    if is_partial:
        paged_decode_reduce_kernel[shapes["S"], num_heads](
            output,
            partials,
            lse,
            query if sinks is None else sinks,
            num_splits,
            *output.stride()[:2],
            VALUE_HEAD_DIM=value_head_dim,
            BLOCK_DV=block_dv,
            HAS_SINKS=sinks is not None,
            num_warps=1 if block_dv <= 128 else 2,
            **COMPILE_OPTIONS,
        )


def padded_head_dim(head_dim: int) -> int:
    """The dimension that a tile has in registers."""
    return max(16, next_power_of_2(head_dim))


def _check(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    sinks: Tensor | None,
    tokens: str,
) -> Shapes:
    shapes = Shapes()
    shapes.check("query", query, f"{tokens} H D")
    shapes.check("k_cache", k_cache, "N B KV D")
    shapes.check("v_cache", v_cache, "N B KV Dv")
    shapes.check("seq_lens", seq_lens, "S")
    shapes.check("block_tables", block_tables, "S M")
    shapes.check("output", output, f"{tokens} H Dv")
    if sinks is not None:
        shapes.check("sinks", sinks, "H")
        check_dtype("sinks", sinks, FLOAT_DTYPES)
    check_dtype("query", query, FLOAT_DTYPES)
    check_dtype("output", output, (query.dtype,))
    check_dtype("k_cache", k_cache, (query.dtype, *FP8_DTYPES))
    check_dtype("v_cache", v_cache, (k_cache.dtype,))
    check_dtype("block_tables", block_tables, (torch.int32,))
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    for name in ("D", "Dv"):
        if shapes[name] > MAX_HEAD_DIM:
            raise ValueError(
                f"{name} is {shapes[name]}; the kernels go up to a head dimension of {MAX_HEAD_DIM}"
            )
    if shapes["H"] % shapes["KV"]:
        raise ValueError(
            f"query has {shapes['H']} heads; it should be a multiple of the {shapes['KV']} KV heads"
        )
    return shapes


def _check_numbers(
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    k_scale: float,
    v_scale: float,
) -> None:
    check_positive("scale", scale)
    check_positive("sliding_window", sliding_window)
    check_positive("softcap", softcap)
    check_positive("k_scale", k_scale)
    check_positive("v_scale", v_scale)


def _workspace(name: str, buffer: Tensor | None, num_elements: int, query: Tensor) -> Tensor:
    if buffer is None:
        raise ValueError(f"{name} is needed when the keys are split")
    check_dtype(name, buffer, (torch.float32,))
    if not buffer.is_contiguous() or buffer.numel() < num_elements:
        raise ValueError(
            f"{name} has {buffer.numel()} elements; it should be contiguous with at least "
            f"{num_elements}"
        )
    if buffer.device != query.device:
        raise ValueError(f"{name} is on {buffer.device}, but query is on {query.device}")
    return buffer


def _score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Factors that turn a product into log2 units: of the score, and of the capped score.

    tanh(x) is 1 - 2 / (exp(2x) + 1), so a capped score is scaled as the exponent of that.
    """
    if softcap is None:
        return scale * _LOG2_E, 0.0
    return scale * 2.0 * _LOG2_E / softcap, softcap * _LOG2_E
