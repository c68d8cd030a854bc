"""Models of bfloat16 weights computed in float32: half of the bytes, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cbatch_kernels import cpu_linear
from cbatch_kernels.cpu_library import CPUKernels
from transformers import AutoModelForCausalLM

from cbatch_cli.assembly import build_core, load_for_engines
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.config import EngineConfig
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import NotingBackend
from tests.cpu_variants import each_variant, variants
from tests.models.test_fusion import logits
from tests.test_exactness import requests_of, run, transformers_generate
from tests.tiny_models import tiny_model
from tests.tiny_tokenizers import save_byte_tokenizer

PROMPTS = ((3,), tuple(range(40, 77)), tuple(range(5, 200, 17)), (9, 9, 9, 250, 3))


def exact_model(name: str) -> HFModel:
    """A tiny model in float32 that came from bfloat16."""
    return HFModel(
        tiny_model(name, dtype=torch.bfloat16).float(),
        max_model_len=512,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )


def fused(model: HFModel, kernels: CPUKernels) -> FusionReport:
    return fuse_layers(model, mode="deterministic", kernels=kernels)


def in_steps(*args: Any, **options: Any) -> NotingBackend:
    """Has every kernel called by itself."""
    return NotingBackend(CPUAttentionBackend(*args, **options))


@each_variant
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2_softcap", "gemma3", "phi3"])
def test_logits_have_the_bits_of_float32_panels(
    kernels: CPUKernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exact_model(name)
    num_layers = len(model.layer_specs)
    assert fused(model, kernels).linear_kinds == {
        "packed_bfloat16": 4 * num_layers,
        "two_stage": 1,
    }
    monkeypatch.setattr(cpu_linear, "holds_bfloat16", lambda *_: False)
    in_float32 = exact_model(name)
    assert fused(in_float32, kernels).linear_kinds == {"packed": 4 * num_layers, "two_stage": 1}
    for make_backend in (CPUAttentionBackend, in_steps):
        expected = logits(in_float32, make_backend, kernels=kernels)
        assert all(map(torch.equal, logits(model, make_backend, kernels=kernels), expected))


@each_variant
def test_layers_on_the_same_input_are_judged_together(kernels: CPUKernels) -> None:
    model = exact_model("llama")
    layer = model.module.model.layers[1]
    with torch.no_grad():
        layer.self_attn.k_proj.weight[-1, -1] += 1e-5
    expected = logits(model)
    report = fused(model, kernels)
    assert report.linear_kinds == {"packed": 1, "packed_bfloat16": 11, "two_stage": 1}
    for actual, exact in zip(
        logits(model, CPUAttentionBackend, kernels=kernels), expected, strict=True
    ):
        scale = max(exact.abs().max().item(), 1.0)
        torch.testing.assert_close(actual, exact, rtol=0.0, atol=2e-5 * scale)


@each_variant
def test_nothing_is_kept_of_the_float32_weights(kernels: CPUKernels) -> None:
    model = exact_model("llama")
    before = sum(weight.nbytes for weight in model.module.parameters())
    in_layers = sum(
        weight.nbytes for weight in model.module.model.layers.parameters() if weight.dim() == 2
    )
    fused(model, kernels)
    assert sum(weight.nbytes for weight in model.module.parameters()) == before - in_layers


@pytest.mark.skipif(not variants(), reason="the CPU kernels were not built")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_bfloat16_checkpoint_gives_the_ids_of_transformers_in_float32(
    tmp_path: Path, name: str
) -> None:
    tiny_model(name, dtype=torch.bfloat16).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    config = EngineConfig(dtype="float32", device="cpu", block_size=4, num_kv_blocks=200)
    loaded = load_for_engines(str(tmp_path), config)
    assert loaded.fusion is not None
    assert set(loaded.fusion.linear_kinds) == {"packed_bfloat16", "two_stage"}
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = [
        transformers_generate(oracle, prompt, max_new_tokens=12, pad_token_id=258)
        for prompt in PROMPTS
    ]
    core, _ = build_core(loaded.model, config)
    for row, output in run(core, requests_of(expected)).items():
        expected[row].check(output)
