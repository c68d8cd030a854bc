"""The last layer computes only the rows that are asked for: the same bits and the same cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels, LayerArguments, load_kernels
from cbatch_kernels.cpu_linear import LinearMode
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.fusion import fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import layer_caches, step_metadata
from tests.attention.paged_cases import UNREADABLE_BLOCK
from tests.cpu_variants import each_variant
from tests.models.test_fused_decoder import model_of_layers

BLOCK_SIZE = 4
# A row with one new token, a short and a long chunk, and one that starts; then tokens of no row.
CACHED, NEW, NUM_OUTSIDE = (21, 3, 13, 0), (1, 5, 19, 9), 2
ENDS = (0, 5, 24, 33)
NUM_TOKENS = sum(NEW) + NUM_OUTSIDE
UNSORTED = [24, 33, 0, 8, 2, 23]

each_mode = pytest.mark.parametrize("mode", ["deterministic", "w8a16", "w8a8"])


def without_cap(name: str, num_layers: int) -> HFModel:
    """Of which nothing follows the head: there, the pass would stay transformers' own."""
    model = model_of_layers(name, num_layers)
    model.module.config.final_logit_softcapping = None
    return model


@functools.cache
def fused(name: str, num_layers: int, mode: LinearMode, variant: str) -> HFModel:
    model = without_cap(name, num_layers)
    report = fuse_layers(model, mode=mode, kernels=load_kernels(variant))
    assert report.is_one_pass
    return model


def run(
    model: HFModel,
    make_backend: Callable[..., AttentionBackend],
    rows: list[int] | range,
    cache_dtype: torch.dtype = torch.float32,
    *,
    unreadable: tuple[int, ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Logits `[N, vocab]` and the caches after the step; what was not written is not a number.

    Sequences that are `unreadable` have no blocks in the step's block tables.
    """
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(4 * 8, generator=generator).int().view(4, 8)
    poisoned = layer_caches(model, num_blocks=32, block_size=BLOCK_SIZE, value=torch.nan)
    caches = [(k.to(cache_dtype), v.to(cache_dtype)) for k, v in poisoned]
    backend = make_backend(model.layer_specs, caches, BLOCK_SIZE)
    model.bind(backend)

    def step(
        parts: list[tuple[int, Tensor]],
        asked: list[int] | range,
        *,
        num_outside: int = 0,
        unreadable: tuple[int, ...] = (),
    ) -> Tensor:
        metadata = step_metadata(parts, tables, BLOCK_SIZE, model.device)
        metadata.block_tables[list(unreadable)] = UNREADABLE_BLOCK
        outside = torch.full((num_outside,), -1)
        slots = torch.cat([metadata.slot_mapping, outside])
        backend.begin_step([dataclasses.replace(metadata, slot_mapping=slots)])
        positions = torch.cat([*(part for _, part in parts), outside + 1])
        token_ids = torch.randint(model.vocab_size, positions.shape, generator=generator)
        return model.forward(token_ids, positions, torch.tensor(asked, dtype=torch.int64))

    before = [(row, torch.arange(length)) for row, length in enumerate(CACHED) if length]
    step(before, range(sum(CACHED)))
    new = [
        (row, torch.arange(cached, cached + length))
        for row, (cached, length) in enumerate(zip(CACHED, NEW, strict=True))
    ]
    poison_workspace(model)
    logits = step(new, rows, num_outside=NUM_OUTSIDE, unreadable=unreadable)
    return logits, [cache for pair in caches for cache in pair]


@torch.inference_mode()
def poison_workspace(model: HFModel) -> None:
    """Rows that a step before it has left there must not pass for this step's."""
    for layer in model.module.model.layers:
        step = getattr(layer.forward, "_step", None)
        if step is not None:
            step.workspace._memory.fill_(torch.nan)


def assert_as_whole(
    model: HFModel, kernels: CPUKernels, rows: list[int], cache_dtype: torch.dtype
) -> None:
    make_backend = functools.partial(CPUAttentionBackend, kernels=kernels)
    whole, whole_caches = run(model, make_backend, range(NUM_TOKENS), cache_dtype)
    logits, caches = run(model, make_backend, rows, cache_dtype)
    assert not whole.isnan().any()
    assert torch.equal(logits, whole[rows])
    for cache, expected in zip(caches, whole_caches, strict=True):
        assert torch.equal(cache.nan_to_num(-1e9), expected.nan_to_num(-1e9))
    # Only the blocks of rows hold numbers, and there all new tokens are.
    num_written = sum(CACHED) + sum(NEW)
    assert all(int(cache[..., 0, 0].isfinite().sum()) == num_written for cache in caches)


@each_variant
@each_mode
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "gemma2_softcap", "gemma3"])
@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=NUM_TOKENS - 1),
    num_layers=st.integers(1, 3),
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(rows=[], num_layers=3, cache_dtype=torch.bfloat16)
@example(rows=UNSORTED, num_layers=1, cache_dtype=torch.float32)
@example(rows=list(ENDS), num_layers=2, cache_dtype=torch.float32)
@example(rows=[7, 34, 7, 35, 7], num_layers=1, cache_dtype=torch.bfloat16)
@example(rows=list(range(NUM_TOKENS)[::-1]), num_layers=2, cache_dtype=torch.float32)
def test_bits_and_caches_are_those_of_a_pass_of_all_rows(
    kernels: CPUKernels,
    name: str,
    mode: LinearMode,
    rows: list[int],
    num_layers: int,
    cache_dtype: torch.dtype,
) -> None:
    assert_as_whole(fused(name, num_layers, mode, kernels.variant), kernels, rows, cache_dtype)


@each_variant
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "gemma2_softcap", "gemma3"])
@pytest.mark.parametrize("rows", [UNSORTED, list(ENDS), [35, 12, 12], []])
def test_logits_and_caches_are_transformers_own(
    kernels: CPUKernels, name: str, rows: list[int]
) -> None:
    expected, expected_caches = run(without_cap(name, 2), TorchAttentionBackend, rows)
    make_backend = functools.partial(CPUAttentionBackend, kernels=kernels)
    model = fused(name, 2, "deterministic", kernels.variant)
    logits, caches = run(model, make_backend, rows)
    assert logits.shape == (len(rows), model.vocab_size)
    for actual, exact in ((logits, expected), *zip(caches, expected_caches, strict=True)):
        torch.testing.assert_close(actual, exact, rtol=2e-5, atol=4e-5, equal_nan=True)


@each_variant
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_sinks(kernels: CPUKernels, name: str) -> None:
    model = model_of_layers(name, 2)
    fuse_layers(model, mode="deterministic", kernels=kernels)
    make_backend = functools.partial(CPUAttentionBackend, kernels=kernels)
    without, _ = run(model, make_backend, UNSORTED)
    for layer in model.module.model.layers:
        layer.forward._sinks = torch.tensor([0.5, -1.0, 2.0, 4.0])
    assert not torch.equal(run(model, make_backend, UNSORTED)[0], without)
    assert_as_whole(model, kernels, UNSORTED, torch.float32)


@each_variant
def test_attention_reads_nothing_for_sequences_that_do_not_sample(kernels: CPUKernels) -> None:
    make_backend = functools.partial(CPUAttentionBackend, kernels=kernels)
    model = fused("llama", 1, "deterministic", kernels.variant)
    whole, whole_caches = run(model, make_backend, range(NUM_TOKENS))
    rows = [ENDS[3], ENDS[0], 35]
    logits, caches = run(model, make_backend, rows, unreadable=(1, 2))
    assert torch.equal(logits, whole[rows])
    for cache, expected in zip(caches, whole_caches, strict=True):
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [UNSORTED, [], [*range(NUM_TOKENS)], [3] * 2 * NUM_TOKENS])
def test_only_the_last_layer_is_pruned(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels()
    noted: list[int] = []

    def note(arguments: int, call: Any = kernels.decoder_layer) -> None:
        noted.append(LayerArguments.from_address(arguments).num_rows)
        call(arguments)

    monkeypatch.setattr(kernels, "decoder_layer", note)
    model = model_of_layers("gemma3", 3)
    fuse_layers(model, mode="deterministic", kernels=kernels)
    run(model, functools.partial(CPUAttentionBackend, kernels=kernels), rows)
    assert noted[-3:] == [NUM_TOKENS, NUM_TOKENS, min(len(rows), NUM_TOKENS)]


def test_rows_that_cannot_be_are_refused() -> None:
    kernels = load_kernels()
    model = fused("llama", 2, "deterministic", kernels.variant)
    make_backend = functools.partial(CPUAttentionBackend, kernels=kernels)
    for rows in ([NUM_TOKENS], [3, -1]):
        with pytest.raises(IndexError, match=f"outside of {NUM_TOKENS} tokens"):
            run(model, make_backend, rows)
    tokens = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    for indices in (torch.tensor([3, 4], dtype=torch.int32), torch.arange(8)[::2]):
        with pytest.raises(ValueError, match="contiguous int64"):
            model.forward(tokens, tokens, indices)
