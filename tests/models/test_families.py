"""Random tiny models of many families: packed, chunked, mixed steps equal one-shot eager logits."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.attention.metadata import AttentionMetadata
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.self_check import self_check
from tests.packed_steps import PagedRow, run_step
from tests.tiny_models import CONFIGS, VOCAB_SIZE, tiny_model

MAX_LENGTH = 48


def wrapped(name: str, *, dtype: torch.dtype = torch.float32) -> HFModel:
    return HFModel(
        tiny_model(name, dtype=dtype),
        max_model_len=512,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )


cached_model = functools.cache(wrapped)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_logits_of_eager_attention(name: str, data: st.DataObject) -> None:
    model = cached_model(name)
    block_size = data.draw(st.sampled_from([1, 4, 16]), label="block size")
    lengths = data.draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=4), label="rows")
    blocks_per_row = -(-MAX_LENGTH // block_size)
    order = torch.randperm(len(lengths) * blocks_per_row).view(len(lengths), blocks_per_row)
    rows = [
        PagedRow(torch.randint(VOCAB_SIZE, (length,)), blocks)
        for length, blocks in zip(lengths, order, strict=True)
    ]
    caches = [
        (
            torch.full((order.numel(), block_size, spec.num_kv_heads, spec.head_dim), torch.nan),
            torch.full(
                (order.numel(), block_size, spec.num_kv_heads, spec.value_head_dim), torch.nan
            ),
        )
        for spec in model.layer_specs
    ]
    backend = TorchAttentionBackend(model.layer_specs, caches, block_size)
    model.bind(backend)
    while unfinished := [row for row in rows if row.computed < len(row.token_ids)]:
        work = []
        for row in unfinished:
            left = len(row.token_ids) - row.computed
            new = data.draw(st.sampled_from([0, 1, 3, 10, MAX_LENGTH]), label="new tokens")
            if new:
                work.append((row, min(new, left)))
        run_step(model, backend, work or [(unfinished[0], 1)], block_size)
    for row in rows:
        everything = torch.arange(len(row.token_ids))
        expected = model.eager_logits(row.token_ids, everything)
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            torch.cat(row.logits), expected, rtol=0.0, atol=1e-5 * max(scale, 1.0)
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_self_check_accepts_the_family(name: str) -> None:
    self_check(wrapped(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss_sinks"])
def test_self_check_accepts_half_precision(name: str, dtype: torch.dtype) -> None:
    model = wrapped(name, dtype=dtype)
    self_check(model)
    token_ids = torch.arange(3)
    assert model.dtype == dtype
    assert model.eager_logits(token_ids, token_ids).dtype == torch.float32


def test_layers_are_recorded_as_they_are() -> None:
    gemma = wrapped("gemma3").layer_specs
    assert [spec.index for spec in gemma] == [0, 1, 2]
    assert [spec.sliding_window for spec in gemma] == [8, None, 8]
    assert [spec.kind for spec in gemma] == ["window", "full", "window"]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in gemma} == {(4, 2, 8)}
    deepseek = wrapped("deepseek_v3_unequal_dims").layer_specs
    assert {(spec.head_dim, spec.value_head_dim) for spec in deepseek} == {(12, 6)}


def test_what_the_engine_reads_of_a_model() -> None:
    model = wrapped("llama")
    assert model.vocab_size == VOCAB_SIZE
    assert model.dtype == torch.float32 and model.device == torch.device("cpu")
    weights = list(tiny_model("llama").parameters())
    assert model.num_parameter_bytes == sum(weight.numel() * 4 for weight in weights)


def test_a_step_without_samples_gives_no_logits() -> None:
    model = wrapped("llama")
    backend = TorchAttentionBackend(
        model.layer_specs, [(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8))] * 3, 4
    )
    model.bind(backend)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.tensor([4, 5, 6]),
        num_decodes=0,
        max_query_len=3,
        max_seq_len=3,
        query_lens_cpu=(3,),
        seq_lens_cpu=(3,),
    )
    backend.begin_step([metadata])
    nothing = torch.zeros(0, dtype=torch.int64)
    logits = model.forward(torch.tensor([5, 6, 7]), torch.arange(3), nothing)
    assert logits.shape == (0, VOCAB_SIZE) and logits.dtype == torch.float32


def test_two_models_do_not_share_a_backend() -> None:
    first, second = wrapped("llama"), wrapped("llama")
    self_check(first)
    self_check(second)
    self_check(first)
