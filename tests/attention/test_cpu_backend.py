"""The compiled attention against float64, with everything poisoned that must not be read."""

import dataclasses
import functools

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata
from tests.attention.paged_cases import PagedCase, make_case
from tests.cpu_variants import each_variant

FLOATS = ("query", "key", "value", "k_cache", "v_cache", "sinks")


def run(case: PagedCase, kernels: CPUKernels) -> tuple[Tensor, Tensor, Tensor]:
    return case.run_backend(functools.partial(CPUAttentionBackend, kernels=kernels))


def exact(case: PagedCase) -> tuple[Tensor, Tensor, Tensor]:
    """What the reference makes of a case in float64, caches rounded as they are stored."""
    tensors = {name: getattr(case, name) for name in FLOATS}
    tensors["key"] = case.key.to(case.k_cache.dtype)
    tensors["value"] = case.value.to(case.v_cache.dtype)
    doubles = {name: None if t is None else t.double() for name, t in tensors.items()}
    return dataclasses.replace(case, **doubles).run_reference()


def assert_equals_reference(case: PagedCase, kernels: CPUKernels, tolerance: float = 3e-6) -> None:
    actual, k_cache, v_cache = run(case, kernels)
    expected, k_expected, v_expected = exact(case)
    assert not actual.isnan().any()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k_cache.double(), k_expected, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(v_cache.double(), v_expected, equal_nan=True, rtol=0, atol=0)


def with_cache_dtype(case: PagedCase, dtype: torch.dtype) -> PagedCase:
    return dataclasses.replace(case, k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    decodes = st.tuples(st.integers(0, 150) | st.integers(500, 1100), st.just(1))
    chunks = st.tuples(st.sampled_from([0, 1, 15, 16, 17, 90, 500]), st.integers(2, 40))
    lengths = draw(st.lists(decodes, max_size=3)) + draw(st.lists(chunks, max_size=2))
    if not lengths:
        lengths = [(draw(st.integers(0, 40)), draw(st.integers(1, 90)))]
    case = make_case(
        lengths,
        seed=draw(st.integers(0, 2**32)),
        block_size=draw(st.sampled_from([1, 16, 64, 100])),
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group_size=draw(st.sampled_from([1, 2, 3, 4, 20])),
        head_dim=draw(st.sampled_from([4, 16, 33, 80])),
        value_head_dim=draw(st.sampled_from([4, 6, 16, 48, 80])),
        window=draw(st.none() | st.integers(1, 100) | st.integers(490, 530)),
        softcap=draw(st.none() | st.floats(0.5, 5.0)),
        with_sinks=draw(st.booleans()),
        stored_already=draw(st.sampled_from([0, 0, 1, 3])),
        dtype=torch.float32,
    )
    return with_cache_dtype(case, draw(st.sampled_from([torch.float32, torch.bfloat16])))


@each_variant
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_equals_the_reference(kernels: CPUKernels, case: PagedCase) -> None:
    assert_equals_reference(case, kernels)


@each_variant
@pytest.mark.parametrize("window", [None, 20, 65])
@pytest.mark.parametrize("cached", [0, 63, 500])
def test_chunks_of_several_tiles(kernels: CPUKernels, cached: int, window: int | None) -> None:
    lengths = [(cached, 70), (5, 33)]
    case = make_case(
        lengths, window=window, group_size=1, num_kv_heads=1, head_dim=256, dtype=torch.float32
    )
    assert_equals_reference(case, kernels)


def only(case: PagedCase, sequence: int, first: int, last: int) -> PagedCase:
    """A step that computes the tokens `first` to `last` of one sequence of `case` alone."""
    metadata = case.metadata
    start = int(metadata.query_start_loc[sequence])
    cached = metadata.seq_lens_cpu[sequence] - metadata.query_lens_cpu[sequence]
    seq_len, new = cached + last, last - first
    tokens = slice(start + first, start + last)
    alone = AttentionMetadata(
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=metadata.block_tables[sequence : sequence + 1],
        slot_mapping=metadata.slot_mapping[tokens],
        num_decodes=int(new == 1),
        max_query_len=new,
        max_seq_len=seq_len,
        query_lens_cpu=(new,),
        seq_lens_cpu=(seq_len,),
    )
    return dataclasses.replace(
        case,
        metadata=alone,
        query=case.query[tokens],
        key=case.key[tokens],
        value=case.value[tokens],
    )


@each_variant
@pytest.mark.parametrize("window", [None, 50, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_company_chunks_or_threads(
    kernels: CPUKernels,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [(1300, 1), (17, 1), (480, 70), (30, 1), (511, 1), (512, 3)] + [(40, 1)] * 12
    case = make_case(lengths, dtype=torch.float32, window=window, head_dim=40, block_size=16)
    case = with_cache_dtype(case, dtype)
    together, k_cache, v_cache = run(case, kernels)
    monkeypatch.setattr("cbatch_cli.attention.cpu_backend.num_threads", lambda: threads)
    stored = dataclasses.replace(case, k_cache=k_cache, v_cache=v_cache)
    for sequence, new in enumerate(case.metadata.query_lens_cpu):
        start = int(case.metadata.query_start_loc[sequence])
        chunks = [(0, new), (0, 1), (new - 1, new), (new // 3, new // 2 + 1)]
        for first, last in chunks:
            alone = run(only(stored, sequence, first, last), kernels)[0]
            assert torch.equal(alone, together[start + first : start + last])


@each_variant
def test_strided_views_and_caches_with_heads_before_slots(kernels: CPUKernels) -> None:
    case = make_case([(9, 1), (3, 30)], dtype=torch.float32)

    def heads_first(states: Tensor) -> Tensor:
        return states.transpose(0, 1).contiguous().transpose(0, 1)

    expected = run(case, kernels)[0]
    strided = dataclasses.replace(
        case,
        query=heads_first(case.query),
        key=heads_first(case.key),
        value=heads_first(case.value),
    )
    assert torch.equal(run(strided, kernels)[0], expected)
    last_strided = dataclasses.replace(case, query=case.query.mT.contiguous().mT)
    assert torch.equal(run(last_strided, kernels)[0], expected)

    caches = [
        cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (case.k_cache, case.v_cache)
    ]
    backend = CPUAttentionBackend([case.layer], [(caches[0], caches[1])], case.block_size, kernels)
    backend.begin_step([case.metadata])
    output = backend.forward(
        case.layer, case.query, case.key, case.value, scale=case.scale, softcap=None, sinks=None
    )
    assert torch.equal(output, expected)


@each_variant
def test_bfloat16_models_get_bfloat16_back(kernels: CPUKernels) -> None:
    case = make_case([(30, 1), (3, 30)], dtype=torch.bfloat16, softcap=3.0, with_sinks=True)
    output = run(case, kernels)[0]
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact(case)[0], rtol=8e-3, atol=8e-3)


def padded(case: PagedCase, padding: int) -> PagedCase:
    """`case` with tokens after all others that belong to no sequence."""
    slots = torch.cat([case.metadata.slot_mapping, torch.full((padding,), -1)])
    return dataclasses.replace(
        case,
        metadata=dataclasses.replace(case.metadata, slot_mapping=slots),
        **{
            name: torch.cat([states, states[:padding]])
            for name in ("query", "key", "value")
            for states in [getattr(case, name)]
        },
    )


@each_variant
def test_tokens_of_no_sequence_come_out_as_zeros(kernels: CPUKernels) -> None:
    case = make_case([(9, 1), (3, 4)], dtype=torch.float32)
    padding = 3
    output = run(padded(case, padding), kernels)[0]
    assert torch.equal(output[:-padding], run(case, kernels)[0])
    assert not output[-padding:].any()


@each_variant
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group_size", [1, 3])
def test_queries_before_the_first_that_is_wanted_are_left_out(
    kernels: CPUKernels, group_size: int, window: int | None
) -> None:
    """What is left out stays zero, as it is made where some tokens belong to no sequence."""
    lengths = [(600, 1), (500, 70), (0, 33), (17, 1), (40, 20)]
    case = make_case(
        lengths, dtype=torch.float32, group_size=group_size, window=window, with_sinks=True
    )
    case = padded(case, 1)
    expected, *expected_caches = exact(case)
    skipped = torch.tensor([0, 69, 7, 1, 0], dtype=torch.int32)
    caches = (case.k_cache.clone(), case.v_cache.clone())
    backend = CPUAttentionBackend([case.layer], [caches], case.block_size, kernels)
    backend.begin_step([case.metadata])
    backend.arguments(case.layer).first_queries = skipped.data_ptr()
    states = (case.query, case.key, case.value)
    output = backend.forward(case.layer, *states, scale=case.scale, softcap=None, sinks=case.sinks)
    for start, left_out in zip(case.metadata.query_start_loc.tolist(), skipped, strict=False):
        expected[start : start + left_out] = 0.0
        assert not output[start : start + left_out].any()
    torch.testing.assert_close(output.double(), expected, rtol=3e-6, atol=3e-6)
    for cache, exact_cache in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache.double(), exact_cache, equal_nan=True, rtol=0, atol=0)
    everything = run(case, kernels)[0]
    is_wanted = output.flatten(1).any(dim=1)
    assert torch.equal(output[is_wanted], everything[is_wanted])


@each_variant
def test_a_query_that_is_not_a_number_spoils_its_own_row_only(kernels: CPUKernels) -> None:
    case = make_case([(40, 5), (7, 1)], dtype=torch.float32, group_size=2, num_kv_heads=1)
    query = case.query.clone()
    query[2, 1, 3] = torch.nan
    output = run(dataclasses.replace(case, query=query), kernels)[0]
    expected = run(case, kernels)[0]
    assert output[2, 1].isnan().all()
    output[2, 1] = expected[2, 1]
    assert torch.equal(output, expected)


@each_variant
def test_other_cache_dtypes_are_refused(kernels: CPUKernels) -> None:
    with pytest.raises(ValueError, match="float16"):
        run(make_case([(3, 1)], dtype=torch.float16), kernels)
