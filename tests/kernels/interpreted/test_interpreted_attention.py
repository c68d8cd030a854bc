"""Paged attention and the KV write, interpreted, against their meaning in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from cbatch_kernels import reference
from cbatch_kernels.kv_store import store_kv
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.paged_cases import PagedCase, make_case
from tests.kernels.interpreted.attention_checks import (
    check_decode,
    check_prefill,
    check_store,
    run_decode,
    run_prefill,
    small_tiles,
    with_fp8_cache,
)
from tests.kernels.interpreted.guarded import guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]

# Lengths around the edges of tiles and blocks.
EDGE_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)

drawn = settings(deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw: st.DrawFn, *, decodes: bool) -> PagedCase:
    any_length = st.integers(1, 700) | st.sampled_from(EDGE_LENGTHS)
    if decodes:
        lengths = [(length - 1, 1) for length in draw(st.lists(any_length, min_size=1, max_size=3))]
    else:
        chunks = st.tuples(st.integers(0, 650) | st.sampled_from(EDGE_LENGTHS), st.integers(1, 50))
        lengths = draw(st.lists(chunks, min_size=1, max_size=2))
    head_dim = draw(st.sampled_from([64, 80, 128, 256]))
    case = make_case(
        lengths,
        seed=draw(st.integers(0, 2**32)),
        block_size=draw(st.sampled_from([16, 32])),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group_size=draw(st.integers(1, 8)),
        head_dim=head_dim,
        value_head_dim=draw(st.sampled_from([head_dim, head_dim // 2])),
        window=draw(st.none() | st.integers(1, 100) | st.integers(1, 700)),
        softcap=draw(st.none() | st.just(30.0) | st.floats(0.5, 5.0)),
        with_sinks=draw(st.booleans()),
        stored_already=draw(st.sampled_from([0, 0, 1])),
        dtype=draw(st.sampled_from(DTYPES)),
    )
    fp8_dtype = draw(st.none() | st.sampled_from(FP8_DTYPES))
    return with_fp8_cache(case, fp8_dtype) if fp8_dtype else case


@settings(drawn, max_examples=40)
@given(
    case=cases(decodes=False),
    block_m=st.sampled_from([16, 32, 64]),
    block_n=st.sampled_from([16, 32]),
)
def test_prefill(case: PagedCase, block_m: int, block_n: int) -> None:
    check_prefill(check_store(case), small_tiles(block_m, block_n))


@settings(drawn, max_examples=40)
@given(
    case=cases(decodes=True),
    block_n=st.sampled_from([16, 32, 64]),
    splits=st.sampled_from([(1, None), (3, None), (4, None), (8, None), (11, 64)]),
)
def test_decode(case: PagedCase, block_n: int, splits: tuple[int, int | None]) -> None:
    num_splits, split_size = splits
    tiles = small_tiles(block_n=block_n)
    check_decode(check_store(case), tiles, num_splits=num_splits, split_size=split_size)


@pytest.mark.parametrize("window", [None, 1, 3, 16, 17, 40])
@pytest.mark.parametrize("group_size", [1, 3])
def test_chunks_that_straddle_tiles_and_query_blocks(group_size: int, window: int | None) -> None:
    case = make_case(
        [(0, 35), (15, 18), (31, 17), (47, 16)],
        num_kv_heads=1,
        group_size=group_size,
        head_dim=16,
        window=window,
        dtype=torch.float32,
        with_sinks=group_size == 3,
    )
    check_prefill(check_store(case), small_tiles())


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 50])
@pytest.mark.parametrize(("num_splits", "split_size"), [(1, None), (3, None), (9, 16)])
def test_decode_at_every_edge(num_splits: int, split_size: int | None, window: int | None) -> None:
    case = make_case(
        [(length - 1, 1) for length in EDGE_LENGTHS],
        num_kv_heads=2,
        head_dim=16,
        window=window,
        dtype=torch.float32,
        with_sinks=True,
    )
    check_decode(check_store(case), small_tiles(), num_splits=num_splits, split_size=split_size)


def test_padded_rows_give_zeros() -> None:
    case = make_case([(40, 1), (20, 1)], dtype=torch.float32, with_sinks=True, head_dim=16)
    stored = check_store(case)
    padded = dataclasses.replace(
        stored,
        metadata=dataclasses.replace(
            stored.metadata, seq_lens=torch.tensor([0, 21], dtype=torch.int32)
        ),
    )
    for num_splits, split_size in ((1, None), (2, None), (2, 32)):
        whole = run_decode(stored, small_tiles(), num_splits=num_splits, split_size=split_size)
        output = run_decode(padded, small_tiles(), num_splits=num_splits, split_size=split_size)
        assert not output[0].any()
        assert torch.equal(output[1], whole[1])


@pytest.mark.parametrize("window", [None, 40])
def test_fixed_splits_give_the_same_bits_in_every_batch(window: int | None) -> None:
    lengths = [(199, 1), (70, 1), (3, 1)]
    case = check_store(
        make_case(lengths, dtype=torch.float32, window=window, with_sinks=True, head_dim=16)
    )
    together = run_decode(case, small_tiles(), num_splits=7, split_size=32)
    for index, (cached, _) in enumerate(lengths):
        alone = _only(case, index)
        num_splits = cached // 32 + 1
        output = run_decode(alone, small_tiles(), num_splits=num_splits, split_size=32)
        assert torch.equal(output[0], together[index])


def test_a_chunk_gives_the_same_bits_in_every_batch() -> None:
    case = check_store(make_case([(33, 20), (5, 40)], dtype=torch.bfloat16, window=24, head_dim=16))
    together = run_prefill(case, small_tiles(32, 16))
    for index, part in enumerate((slice(0, 20), slice(20, 60))):
        assert torch.equal(run_prefill(_only(case, index), small_tiles(32, 16)), together[part])


def _only(case: PagedCase, sequence: int) -> PagedCase:
    metadata = case.metadata
    start, end = metadata.query_start_loc[sequence : sequence + 2].tolist()
    return dataclasses.replace(
        case,
        query=case.query[start:end],
        metadata=dataclasses.replace(
            metadata,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=metadata.seq_lens[sequence : sequence + 1],
            block_tables=metadata.block_tables[sequence : sequence + 1],
            num_decodes=int(end - start == 1),
            max_query_len=end - start,
        ),
    )


def test_transposed_queries_and_keys() -> None:
    case = make_case([(9, 1), (3, 30)], dtype=torch.float32, head_dim=16)

    def heads_first(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(0, 1).contiguous().transpose(0, 1)

    strided = dataclasses.replace(
        case,
        query=heads_first(case.query),
        key=heads_first(case.key),
        value=heads_first(case.value),
    )
    check_prefill(check_store(strided), small_tiles())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_fp8_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    key = torch.tensor([1e30, -1e30, math.nan, 0.3] * 4).view(1, 1, 16)
    caches = [torch.zeros(1, 1, 1, 16, dtype=dtype) for _ in range(4)]
    slots = torch.zeros(1, dtype=torch.int64)
    store_kv(key, key, caches[0], caches[1], slots, k_scale=2.0)
    reference.store_kv(key, key, caches[2], caches[3], slots, k_scale=2.0)
    assert torch.equal(caches[0].view(torch.uint8), caches[2].view(torch.uint8))
    assert torch.equal(caches[1].view(torch.uint8), caches[3].view(torch.uint8))


def check_cache_of_more_than_2_31_elements(folder: Path) -> None:
    """A cache whose last block lies past 2**31 elements; the file is a hole except for it."""
    block_size, head_dim = 16, 64
    num_blocks = 2**31 // (block_size * head_dim) + 2
    far = num_blocks - 1

    def cache(name: str) -> torch.Tensor:
        size = num_blocks * block_size * head_dim
        path = folder / name
        with path.open("wb") as file:
            file.truncate(2 * size)
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
        return flat.view(num_blocks, block_size, 1, head_dim)

    small = make_case([(15, 1)], num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    block = int(small.metadata.block_tables[0, 0])
    caches = {"k_cache": cache("k"), "v_cache": cache("v")}
    for name, tensor in caches.items():
        tensor[far] = getattr(small, name)[block]
    tables = torch.full_like(small.metadata.block_tables, far)
    slots = torch.tensor([far * block_size + 15])
    large = dataclasses.replace(
        small,
        metadata=dataclasses.replace(small.metadata, block_tables=tables, slot_mapping=slots),
        **caches,
    )
    store_kv(large.key, large.value, large.k_cache, large.v_cache, slots)
    assert torch.equal(large.k_cache[far, 15], large.key[0])
    expected = run_prefill(check_store(small), small_tiles())
    assert torch.equal(run_prefill(large, small_tiles()), expected)
    assert torch.equal(
        run_decode(large, small_tiles(), num_splits=1),
        run_decode(check_store(small), small_tiles(), num_splits=1),
    )


def check_tables_that_end_where_memory_does() -> None:
    """Tiles reach past the last row's blocks; what would be behind them must not be looked up."""
    for lengths in ([(9, 1), (18, 1)], [(0, 5), (10, 9)]):
        case = make_case(lengths, num_kv_heads=1, head_dim=16, dtype=torch.float32)
        tables = guarded(case.metadata.block_tables[:, :2])
        case = dataclasses.replace(
            case, metadata=dataclasses.replace(case.metadata, block_tables=tables)
        )
        tiles = small_tiles(block_n=64)
        if case.metadata.num_decodes:
            check_decode(check_store(case), tiles, num_splits=1)
        else:
            check_prefill(check_store(case), tiles)


def test_tables_that_end_where_memory_does() -> None:
    check_tables_that_end_where_memory_does()


def test_offsets_past_2_31_elements(tmp_path: Path) -> None:
    check_cache_of_more_than_2_31_elements(tmp_path)
