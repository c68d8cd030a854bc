"""Wrappers say what is wrong with a tensor before anything is launched; no triton is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cbatch_kernels.kv_store import store_kv
from cbatch_kernels.layers import act_and_mul, rms_norm, rope
from cbatch_kernels.paged_attention import paged_decode, paged_prefill
from cbatch_kernels.sampling import filter_thresholds, gumbel_argmax, scale_logits
from cbatch_kernels.tiles import attention_tiles, num_decode_splits

TILES = attention_tiles(
    "sm_90", head_dim=16, dtype=torch.float32, kv_dtype=torch.float32, kind="prefill"
)


def prefill(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(5, 4, 16),
        "k_cache": torch.zeros(3, 16, 2, 16),
        "v_cache": torch.zeros(3, 16, 2, 16),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "output": torch.zeros(5, 4, 16),
        "tiles": TILES,
        "max_query_len": 3,
        "scale": 0.25,
    }
    paged_prefill(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 64)}, "query has shape [5, 64]; it should be [T, H, D]"),
        ({"query": torch.zeros(5, 3, 16), "output": torch.zeros(5, 3, 16)}, "query has 3 heads"),
        ({"query": torch.zeros(5, 16, 4).transpose(1, 2)}, "stride 4 in its last dimension"),
        ({"output": torch.zeros(6, 4, 16)}, "T should be 5 as in query"),
        (
            {"output": torch.zeros(5, 4, 16).half()},
            "output has dtype float16; it should be float32",
        ),
        ({"k_cache": torch.zeros(3, 16, 2, 32)}, "D should be 16 as in query"),
        ({"v_cache": torch.zeros(3, 16, 2, 16).half()}, "v_cache has dtype float16"),
        ({"block_tables": torch.zeros(2, 1)}, "block_tables has dtype float32; it should be int32"),
        ({"block_tables": torch.zeros(3, 1, dtype=torch.int32)}, "S should be 2 as in seq_lens"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, "one more than the 2 of seq_lens"),
        ({"sinks": torch.zeros(3)}, "H should be 4 as in query"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta, but query is on cpu"),
        ({"sliding_window": 0}, "sliding_window is 0; it should be above 0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_prefill(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prefill(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_splits": 2}, "partials is needed"),
        ({"num_splits": 2, "partials": torch.zeros(9)}, "at least 256"),
        ({"num_splits": 2, "partials": torch.zeros(256)}, "lse is needed"),
        ({"num_splits": 2, "partials": torch.zeros(256).half()}, "partials has dtype float16"),
        ({"num_splits": 0}, "num_splits is 0"),
        ({"split_size": 100}, "multiple of the 16 keys"),
    ],
)
def test_decode(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_splits": 1} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_decode(
            torch.zeros(2, 4, 16),
            torch.zeros(3, 16, 2, 16),
            torch.zeros(3, 16, 2, 16),
            torch.zeros(2, 1, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, 4, 16),
            tiles=TILES,
            scale=1.0,
            **arguments,
        )


def test_store_kv() -> None:
    states, cache = torch.zeros(2, 1, 16), torch.zeros(3, 16, 1, 16)
    with pytest.raises(ValueError, match="slot_mapping has dtype int32; it should be int64"):
        store_kv(states, states, cache, cache, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="k_cache has dtype float16"):
        store_kv(states, states, cache.half(), cache.half(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"k_scale is 0\.0"):
        slots = torch.zeros(2, dtype=torch.int64)
        store_kv(states, states, cache, cache, slots, k_scale=0.0)


def test_layers() -> None:
    states, weight = torch.zeros(3, 16), torch.zeros(16)
    with pytest.raises(ValueError, match="D should be 16 as in states"):
        rms_norm(states, weight[:8], states, eps=1e-6, round_before_weight=True)
    heads = states.view(3, 1, 16)
    with pytest.raises(ValueError, match="cos has 9 pairs; a head of dimension 16 has fewer"):
        rope(heads, heads, torch.zeros(3, 9), torch.zeros(3, 9))
    with pytest.raises(ValueError, match="activation is 'relu'"):
        act_and_mul(states, states, states, activation="relu")  # type: ignore[arg-type]


def test_sampling() -> None:
    logits, floats, integers = torch.zeros(2, 5), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="presence_penalty, output_counts, in_prompt, slots is"):
        scale_logits(logits, floats, repetition_penalty=floats, frequency_penalty=floats)
    with pytest.raises(ValueError, match="top_k has dtype int64; it should be int32"):
        filter_thresholds(logits, integers, floats, floats, floats)
    with pytest.raises(ValueError, match="logits has dtype float16"):
        gumbel_argmax(
            logits.half(),
            floats,
            floats,
            integers,
            seeds=integers,
            rows=integers,
            samples=integers,
            positions=integers,
        )


@pytest.mark.parametrize(
    ("num_seqs", "max_seq_len", "expected"),
    [(1, 100, 1), (1, 600, 2), (1, 20000, 32), (8, 20000, 4), (200, 20000, 1)],
)
def test_splits_fill_the_device(num_seqs: int, max_seq_len: int, expected: int) -> None:
    num_splits = num_decode_splits(
        num_seqs=num_seqs, num_kv_heads=8, max_seq_len=max_seq_len, num_processors=132
    )
    assert num_splits == expected
