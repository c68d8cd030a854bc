"""Runs the attention kernels on poisoned cases and compares them with the float64 reference."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from cbatch_kernels import reference
from cbatch_kernels.checks import FP8_DTYPES
from cbatch_kernels.kv_store import store_kv
from cbatch_kernels.paged_attention import paged_decode, paged_prefill
from cbatch_kernels.tiles import AttentionTiles
from torch import Tensor

from tests.attention.paged_cases import PagedCase

# Relative, root mean square: of all, and of the worst query of a head.
TOLERANCES = {
    torch.float32: (1e-6, 4e-6),
    torch.float16: (5e-4, 2e-3),
    torch.bfloat16: (4e-3, 1.6e-2),
}


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What fp8 caches are scaled by; keys and values differ, so that a mix-up is seen."""

    k: float = 1.0
    v: float = 1.0


FP8_SCALES = Scales(k=0.5, v=0.03125)


def small_tiles(block_m: int = 16, block_n: int = 16) -> AttentionTiles:
    return AttentionTiles(block_m=block_m, block_n=block_n, num_warps=4, num_stages=1)


def with_fp8_cache(case: PagedCase, dtype: torch.dtype) -> PagedCase:
    """The case with its caches quantised."""
    return dataclasses.replace(
        case,
        k_cache=(case.k_cache / FP8_SCALES.k).to(dtype),
        v_cache=(case.v_cache / FP8_SCALES.v).to(dtype),
    )


def scales_of(case: PagedCase) -> Scales:
    return FP8_SCALES if case.k_cache.dtype in FP8_DTYPES else Scales()


def check_store(case: PagedCase) -> PagedCase:
    """Store by kernel, compare all of the caches with the reference, and return the case after."""
    scales = scales_of(case)
    slots = case.metadata.slot_mapping
    expected = (case.k_cache.clone(), case.v_cache.clone())
    stored = (case.k_cache.clone(), case.v_cache.clone())
    reference.store_kv(case.key, case.value, *expected, slots, k_scale=scales.k, v_scale=scales.v)
    store_kv(case.key, case.value, *stored, slots, k_scale=scales.k, v_scale=scales.v)
    for actual, wanted in zip(stored, expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
    return dataclasses.replace(case, k_cache=stored[0], v_cache=stored[1])


def expected_output(case: PagedCase) -> Tensor:
    """Attention over the caches as they are, in float64."""
    scales = scales_of(case)
    metadata = case.metadata
    return reference.paged_attention(
        case.query.double(),
        case.k_cache.double(),
        case.v_cache.double(),
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale=case.scale,
        sliding_window=case.layer.sliding_window,
        softcap=case.softcap,
        sinks=None if case.sinks is None else case.sinks.double(),
        k_scale=scales.k,
        v_scale=scales.v,
    )


def run_prefill(case: PagedCase, tiles: AttentionTiles) -> Tensor:
    """All sequences through the prefill kernel."""
    output = _poisoned(case, case.query.shape[0])
    scales = scales_of(case)
    metadata = case.metadata
    paged_prefill(
        case.query,
        case.k_cache,
        case.v_cache,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        output,
        tiles=tiles,
        max_query_len=metadata.max_query_len,
        scale=case.scale,
        sliding_window=case.layer.sliding_window,
        softcap=case.softcap,
        sinks=case.sinks,
        k_scale=scales.k,
        v_scale=scales.v,
    )
    return output


def run_decode(
    case: PagedCase, tiles: AttentionTiles, *, num_splits: int, split_size: int | None = None
) -> Tensor:
    """All sequences, of one query each, through the decode kernels."""
    num_seqs = case.query.shape[0]
    assert case.metadata.num_decodes == num_seqs
    output = _poisoned(case, num_seqs)
    num_partials = num_seqs * case.layer.num_heads * num_splits
    scales = scales_of(case)
    paged_decode(
        case.query,
        case.k_cache,
        case.v_cache,
        case.metadata.block_tables,
        case.metadata.seq_lens,
        output,
        tiles=tiles,
        num_splits=num_splits,
        split_size=split_size,
        partials=torch.full((num_partials * case.layer.value_head_dim,), math.nan),
        lse=torch.full((num_partials,), math.nan),
        scale=case.scale,
        sliding_window=case.layer.sliding_window,
        softcap=case.softcap,
        sinks=case.sinks,
        k_scale=scales.k,
        v_scale=scales.v,
    )
    return output


def check_prefill(case: PagedCase, tiles: AttentionTiles) -> None:
    """The prefill kernel over the caches as they are."""
    assert_close(run_prefill(case, tiles), expected_output(case), case.softcap)


def check_decode(
    case: PagedCase, tiles: AttentionTiles, *, num_splits: int, split_size: int | None = None
) -> None:
    """The decode kernels over the caches as they are."""
    output = run_decode(case, tiles, num_splits=num_splits, split_size=split_size)
    assert_close(output, expected_output(case), case.softcap)


def assert_close(actual: Tensor, expected: Tensor, softcap: float | None = None) -> None:
    """Every row close in its own norm, and all of them together closer.

    A capped score is off by rounding errors of the cap itself, however small the score.
    """
    overall, worst = TOLERANCES[actual.dtype]
    capped = 4 * 2.0**-23 * (softcap or 0.0)
    overall, worst = overall + capped, worst + 4 * capped
    difference = actual.double() - expected
    assert not difference.isnan().any(), "NaN: something was read that must not be, or not written"
    rows = difference.norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
    errors = (float(difference.norm() / expected.norm()), float(rows.max()))
    assert errors[0] < overall and errors[1] < worst, errors


def _poisoned(case: PagedCase, num_tokens: int) -> Tensor:
    shape = (num_tokens, case.layer.num_heads, case.layer.value_head_dim)
    return torch.full(shape, math.nan, dtype=case.query.dtype)
