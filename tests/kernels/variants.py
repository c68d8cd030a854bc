"""Calls of the wrappers with tensors that have shapes and types but no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from cbatch_kernels.kv_store import store_kv
from cbatch_kernels.layers import act_and_mul, rms_norm, rope
from cbatch_kernels.matmul import linear
from cbatch_kernels.paged_attention import paged_decode, paged_prefill
from cbatch_kernels.sampling import filter_thresholds, gumbel_argmax, scale_logits
from cbatch_kernels.tiles import attention_tiles, matmul_tiles
from torch import Tensor

from tests.kernels.launches import Launch, record_launches

Features = Literal["plain", "window", "all"]

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)

# e4m3 has no conversions before Ada, and AMD's is a format of its own.
FP8_DTYPES = {
    "sm_80": (torch.float8_e5m2,),
    "sm_89": (torch.float8_e4m3fn, torch.float8_e5m2),
    "sm_90": (torch.float8_e4m3fn, torch.float8_e5m2),
    "sm_100": (torch.float8_e4m3fn, torch.float8_e5m2),
    "gfx942": (torch.float8_e4m3fnuz,),
}


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """One way to call the attention kernels."""

    head_dim: int
    value_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    features: Features = "plain"
    """`all` is a window, a soft cap and sinks."""
    group_size: int = 4
    few_queries: bool = False

    @property
    def label(self) -> str:
        dims = str(self.head_dim)
        if self.value_head_dim:
            dims += f"/{self.value_head_dim}"
        kv_dtype = f" kv {_short(self.kv_dtype)}" if self.kv_dtype else ""
        return f"D {dims} {_short(self.dtype)}{kv_dtype} {self.features}"


def grid(arch: str) -> Iterator[AttentionVariant]:
    """Every head dimension with every dtype that a card has, plain and with all features."""
    for head_dim in HEAD_DIMS:
        for features in ("plain", "all"):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for kv_dtype in (None, *(FP8_DTYPES[arch] if dtype == torch.bfloat16 else ())):
                    yield AttentionVariant(
                        head_dim=head_dim,
                        value_head_dim=128 if head_dim == 192 else None,
                        dtype=dtype,
                        kv_dtype=kv_dtype,
                        features=features,  # type: ignore[arg-type]
                    )


def attention_launches(variant: AttentionVariant, arch: str) -> list[Launch]:
    """Prefill, decode in one split, decode in several, and the reduction."""
    num_kv_heads, num_seqs, num_tokens, max_blocks, num_splits = 8, 32, 4096, 128, 8
    num_heads = num_kv_heads * variant.group_size
    value_head_dim = variant.value_head_dim or variant.head_dim
    kv_dtype = variant.kv_dtype or variant.dtype
    has_window = variant.features != "plain"
    has_all = variant.features == "all"
    k_cache = _empty(1000, 16, num_kv_heads, variant.head_dim, dtype=kv_dtype)
    v_cache = _empty(1000, 16, num_kv_heads, value_head_dim, dtype=kv_dtype)
    tables = _empty(num_seqs, max_blocks, dtype=torch.int32)
    lengths = _empty(num_seqs, dtype=torch.int32)
    starts = _empty(num_seqs + 1, dtype=torch.int32)
    sinks = _empty(num_heads, dtype=variant.dtype) if has_all else None
    window, softcap, scale = (512 if has_window else None), (30.0 if has_all else None), 0.1

    def query(tokens: int) -> Tensor:
        return _empty(tokens, num_heads, variant.head_dim, dtype=variant.dtype)

    def output(tokens: int) -> Tensor:
        return _empty(tokens, num_heads, value_head_dim, dtype=variant.dtype)

    widest = max(variant.head_dim, value_head_dim)
    prefill_tiles = attention_tiles(
        arch,
        head_dim=widest,
        dtype=variant.dtype,
        kv_dtype=kv_dtype,
        kind="prefill",
        has_window_or_cap=has_window,
        num_query_rows=16 if variant.few_queries else None,
    )
    decode_tiles = attention_tiles(
        arch, head_dim=widest, dtype=variant.dtype, kv_dtype=kv_dtype, kind="decode"
    )
    with record_launches() as launches:
        paged_prefill(
            query(num_tokens),
            k_cache,
            v_cache,
            tables,
            starts,
            lengths,
            output(num_tokens),
            tiles=prefill_tiles,
            max_query_len=512,
            scale=scale,
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
        )
        for splits, split_size in ((1, None), (num_splits, None), (1, 512)):
            num_partials = num_seqs * num_heads * splits
            paged_decode(
                query(num_seqs),
                k_cache,
                v_cache,
                tables,
                lengths,
                output(num_seqs),
                tiles=decode_tiles,
                num_splits=splits,
                split_size=split_size,
                partials=_empty(num_partials * value_head_dim, dtype=torch.float32),
                lse=_empty(num_partials, dtype=torch.float32),
                scale=scale,
                sliding_window=window,
                softcap=softcap,
                sinks=sinks,
            )
    return launches[:-1]  # both reductions are alike


def store_launches(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> list[Launch]:
    """The KV write."""
    states = _empty(512, 8, head_dim, dtype=dtype)
    cache = _empty(1000, 16, 8, head_dim, dtype=kv_dtype)
    with record_launches() as launches:
        store_kv(states, states, cache, cache, _empty(512, dtype=torch.int64))
    return launches


def layer_launches(dtype: torch.dtype) -> list[Launch]:
    """Norms of hidden states and of heads, both kinds of rope, both activations."""
    hidden, heads = _empty(512, 4096, dtype=dtype), _empty(512, 32, 128, dtype=dtype)
    wide = _empty(512, 2 * 14336, dtype=dtype)
    angles = _empty(512, 64, dtype=torch.float32)
    with record_launches() as launches:
        for has_residual in (False, True):
            residual = hidden if has_residual else None
            weight = _empty(4096, dtype=dtype)
            rms_norm(hidden, weight, hidden, eps=1e-6, round_before_weight=True, residual=residual)
        rms_norm(
            heads,
            _empty(128, dtype=dtype),
            heads,
            eps=1e-6,
            round_before_weight=False,
            weight_offset=1.0,
        )
        for is_interleaved in (False, True):
            rope(heads, heads[:, :8], angles, angles, is_interleaved=is_interleaved)
        gate, up = wide.chunk(2, dim=1)
        act_and_mul(gate, up, _empty(512, 14336, dtype=dtype), activation="silu")
        act_and_mul(gate, up, _empty(512, 14336, dtype=dtype), activation="gelu_tanh")
    return launches


def linear_launches(dtype: torch.dtype, arch: str) -> list[Launch]:
    """Products with and without bias, of rows that fill tiles and rows that do not."""
    tiles = matmul_tiles(arch, dtype)
    with record_launches() as launches:
        for in_dim, bias in ((4096, None), (4096, _empty(6144, dtype=dtype)), (2888, None)):
            linear(
                _empty(500, in_dim, dtype=dtype),
                _empty(6144, in_dim, dtype=dtype),
                _empty(500, 6144, dtype=dtype),
                bias=bias,
                tiles=tiles,
            )
    return launches


def sampling_launches(vocab_size: int = 151936) -> list[Launch]:
    """Penalties and temperature, filters, and the draw."""
    logits = _empty(64, vocab_size, dtype=torch.float32)
    floats, integers = _empty(64, dtype=torch.float32), _empty(64, dtype=torch.int64)
    with record_launches() as launches:
        scale_logits(logits, floats)
        scale_logits(
            logits,
            floats,
            repetition_penalty=floats,
            frequency_penalty=floats,
            presence_penalty=floats,
            output_counts=_empty(256, vocab_size, dtype=torch.int32),
            in_prompt=_empty(256, vocab_size, dtype=torch.bool),
            slots=integers,
        )
        filter_thresholds(logits, _empty(64, dtype=torch.int32), floats, floats, floats)
        gumbel_argmax(
            logits,
            floats,
            floats,
            integers,
            seeds=integers,
            rows=integers,
            samples=integers,
            positions=integers,
        )
    return launches


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
