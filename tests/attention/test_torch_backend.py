"""The torch backend against the reference, with everything poisoned that must not be read."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.attention.metadata import AttentionMetadata
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from tests.attention.paged_cases import PagedCase, make_case


def assert_equals_reference(case: PagedCase) -> None:
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    for actual, expected in zip(case.run_backend(), case.run_reference(), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)
    assert not case.run_backend()[0].isnan().any()


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    decodes = st.tuples(st.integers(0, 150), st.just(1))
    chunks = st.tuples(st.sampled_from([0, 1, 15, 16, 17, 90]), st.integers(2, 40))
    lengths = draw(st.lists(decodes, max_size=3)) + draw(st.lists(chunks, max_size=2))
    if not lengths:
        lengths = [(draw(st.integers(0, 40)), draw(st.integers(1, 90)))]
    return make_case(
        lengths,
        seed=draw(st.integers(0, 2**32)),
        block_size=draw(st.sampled_from([1, 16, 64])),
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group_size=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([4, 8])),
        value_head_dim=draw(st.sampled_from([4, 6, 8])),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.floats(0.5, 5.0)),
        with_sinks=draw(st.booleans()),
        stored_already=draw(st.sampled_from([0, 0, 1, 3])),
    )


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_equals_the_reference(case: PagedCase) -> None:
    assert_equals_reference(case)


@pytest.mark.parametrize("window", [None, 1, 20, 64, 65, 130])
@pytest.mark.parametrize("cached", [0, 1, 63, 100])
def test_chunks_of_several_query_tiles(cached: int, window: int | None) -> None:
    lengths = [(cached, 200), (5, 64), (0, 65)]
    assert_equals_reference(make_case(lengths, window=window, group_size=1, num_kv_heads=1))


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_a_row_does_not_depend_on_its_neighbours(block_size: int) -> None:
    lengths = [(130, 1), (17, 1), (40, 70)]
    case = make_case(lengths, block_size=block_size, dtype=torch.float32, window=50)
    together = case.run_backend()[0]
    start = 0
    for sequence, (cached, new) in enumerate(lengths):
        end = start + new
        alone = dataclasses.replace(
            case,
            metadata=_only(case.metadata, sequence, start, end),
            query=case.query[start:end],
            key=case.key[start:end],
            value=case.value[start:end],
        )
        assert alone.metadata.seq_lens_cpu == (cached + new,)
        assert torch.equal(alone.run_backend()[0], together[start:end])
        start = end


def _only(metadata: AttentionMetadata, sequence: int, start: int, end: int) -> AttentionMetadata:
    new, seq_len = end - start, metadata.seq_lens_cpu[sequence]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_tables=metadata.block_tables[sequence : sequence + 1],
        slot_mapping=metadata.slot_mapping[start:end],
        num_decodes=int(new == 1),
        max_query_len=new,
        max_seq_len=seq_len,
        query_lens_cpu=(new,),
        seq_lens_cpu=(seq_len,),
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 4e-3)],
)
def test_low_precision_rounds_only_inputs_and_output(dtype: torch.dtype, tolerance: float) -> None:
    lengths = [(300, 1), (60, 70)]
    case = make_case(lengths, dtype=dtype, softcap=4.0, with_sinks=True, window=90)
    output, k_cache, _ = case.run_backend()
    assert output.dtype == dtype and k_cache.dtype == dtype
    exact = dataclasses.replace(
        case,
        **{
            name: getattr(case, name).double()
            for name in ("query", "key", "value", "k_cache", "v_cache", "sinks")
        },
    )
    error = (output.double() - exact.run_reference()[0]).abs().max().item()
    assert error < tolerance


def test_transposed_views_as_models_pass_them() -> None:
    case = make_case([(9, 1), (3, 30)], dtype=torch.float64)

    def heads_first(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(0, 1).contiguous().transpose(0, 1)

    strided = dataclasses.replace(
        case,
        query=heads_first(case.query),
        key=heads_first(case.key),
        value=heads_first(case.value),
    )
    assert torch.equal(strided.run_backend()[0], case.run_backend()[0])


def test_layers_of_different_windows_and_groups_share_each_step() -> None:
    # Both steps need three blocks, so that their caches have one shape.
    groups = [
        [make_case(lengths, seed=seed, num_kv_heads=num_kv_heads) for lengths in steps]
        for seed, num_kv_heads, steps in (
            (1, 2, ([(20, 1), (0, 12)], [(17, 1), (3, 10)])),
            (2, 1, ([(20, 1), (0, 12)], [(17, 1), (3, 10)])),
        )
    ]
    windows = [None, 4, 11]
    layers = [
        dataclasses.replace(groups[group][0].layer, index=index, group=group, sliding_window=window)
        for index, (group, window) in enumerate(itertools.product((0, 1), windows))
    ]
    caches = [
        (torch.empty_like(case.k_cache), torch.empty_like(case.v_cache))
        for case in (groups[layer.group][0] for layer in layers)
    ]
    backend = TorchAttentionBackend(layers, caches, block_size=16)
    for step in range(2):
        backend.begin_step([steps[step].metadata for steps in groups])
        for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):
            case = dataclasses.replace(groups[layer.group][step], layer=layer)
            k_cache.copy_(case.k_cache)
            v_cache.copy_(case.v_cache)
            output = backend.forward(
                layer, case.query, case.key, case.value, scale=case.scale, softcap=None, sinks=None
            )
            torch.testing.assert_close(output, case.run_reference()[0])
