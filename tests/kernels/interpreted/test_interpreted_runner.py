"""The engine as on a GPU, its kernels interpreted: late steps, recorded steps with dummy rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cbatch_kernels import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch_cli.assembly import build_core
from cbatch_cli.attention.triton_backend import TritonAttentionBackend
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.device_sampler import DeviceSampler, SamplingKernels
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.fake_device import (
    CPU,
    LateQueue,
    PlainSampling,
    RememberingCapture,
    device_core,
    runner_of,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model

MAX_MODEL_LEN = 700
"""With one KV head per query head and few sequences, so long rows are split."""


def wrapped(name: str) -> HFModel:
    return HFModel(
        tiny_model(name),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({9}),
        generation_defaults={},
    )


def requests_of(*params: SamplingParams) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            ),
            params=row_params,
        )
        for row, (length, row_params) in enumerate(zip((1, 19, 40), params, strict=True))
    ]


def triton_backend(layers: object, caches: object, block_size: int) -> TritonAttentionBackend:
    return TritonAttentionBackend(
        layers,  # type: ignore[arg-type]
        caches,  # type: ignore[arg-type]
        block_size,
        max_num_seqs=3,
        max_model_len=MAX_MODEL_LEN,
    )


def triton_core(model: HFModel, *, lag: int, sizes: tuple[int, ...] = ()) -> EngineCore:
    core = device_core(
        model,
        queue=LateQueue(),
        lag=lag,
        num_blocks=100,
        block_size=16,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        kernels=sampling,  # type: ignore[arg-type]
        new_backend=triton_backend,
    )
    if sizes:
        capture = RememberingCapture()
        runner_of(core).capture_graphs(
            sizes, capture, vocab_size=VOCAB_SIZE, max_seq_len=MAX_MODEL_LEN
        )
        caches = runner_of(core)._backend._caches.values()  # type: ignore[attr-defined]
        assert all(bool(tensor.isnan().all()) for pair in caches for tensor in pair)
    return core


def generate(core: EngineCore, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    outputs = {output.key.row: output for output in core.generate(requests)}
    assert all(output.error is None for output in outputs.values())
    return {row: tuple(output.token_ids) for row, output in outputs.items()}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_recorded_steps_with_dummy_rows_make_the_same_tokens(name: str) -> None:
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 2, 3)]
    config = EngineConfig(
        device="cpu", block_size=16, num_kv_blocks=60, max_num_seqs=3, max_num_batched_tokens=24
    )
    expected = generate(build_core(wrapped(name), config)[0], requests_of(*lengths))
    # Two rows, and at the end one, run in the graph of three.
    core = triton_core(wrapped(name), lag=1, sizes=(3,))
    assert generate(core, requests_of(*lengths)) == expected
    graphs = runner_of(core)._graphs
    assert graphs is not None and graphs._graphs[3].num_replays >= 2  # type: ignore[attr-defined]


def test_drawn_tokens_are_the_same_late_recorded_or_not() -> None:
    params = (
        SamplingParams(max_tokens=3, temperature=1.0, min_tokens=3),
        SamplingParams(max_tokens=3, temperature=0.7, top_k=9, top_p=0.9),
        SamplingParams(max_tokens=3, ignore_eos=True),
    )
    expected = generate(triton_core(wrapped("llama"), lag=0), requests_of(*params))
    late = generate(triton_core(wrapped("llama"), lag=1, sizes=(1, 3)), requests_of(*params))
    assert late == expected


@settings(deadline=None, derandomize=True, database=None, max_examples=20)
@given(
    params=st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.5]),
            top_k=st.sampled_from([0, 1, 7, 50, 5000]),
            min_p=st.sampled_from([0.0, 0.05, 1.0]),
            min_tokens=st.sampled_from([0, 5]),
            stop_token_ids=st.sampled_from([(), (0, 1, 2)]),
        ),
        min_size=1,
        max_size=6,
    ),
    vocab_size=st.sampled_from([65, 1030]),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_sampler_draws_what_its_plain_form_draws(
    params: list[SamplingParams], vocab_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = 3 * torch.randn(len(params), vocab_size, generator=generator)
    if seed % 3 == 0:
        logits[-1, 5] = torch.nan

    def draw(kernels: SamplingKernels) -> Tensor:
        sampler = DeviceSampler(
            num_slots=8, seed=seed, eos_token_ids=frozenset({3}), device=CPU, kernels=kernels
        )
        slots = np.array([3, 1, 7, 0, 2, 6])[: len(params)]
        for row, (slot, row_params) in enumerate(zip(slots, params, strict=True)):
            sampler.join(int(slot), row_params, row=row, sample=row % 2, num_prompt_tokens=2)
        plan = sampler.plan(slots, np.full(len(slots), 4))
        inputs = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
        sampler.sample(logits.clone(), plan, inputs)
        return sampler.last_token_ids

    assert torch.equal(draw(sampling), draw(PlainSampling()))  # type: ignore[arg-type]
