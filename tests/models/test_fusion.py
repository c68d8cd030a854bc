"""Layers fused over compiled kernels compute what the originals do, and replace nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cbatch_kernels.cpu_head import VocabularyHead
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import NotingBackend
from tests.cpu_variants import each_variant
from tests.models.test_families import PagedRow, run_step, wrapped

FUSED = ("llama", "mistral_window", "qwen2", "qwen3", "gemma2_softcap", "gemma3", "phi3")
LEFT_ALONE = {
    "gpt_oss_sinks": "activation",
    "mixtral": "activation",
    "qwen3_moe": "activation",
    "gpt2": "norms are none",
    "deepseek_v3_unequal_dims": "no plain linear layers",
}
LENGTHS = (40, 23, 9)
BLOCK_SIZE = 4
STEPS = ((30, 7, 0), (1, 5, 9), (1, 1, 0), (8, 10, 0))


def logits(
    model: HFModel, make_backend: Callable[..., AttentionBackend] | None = None, **options: object
) -> list[Tensor]:
    """Logits of three rows, computed in mixed steps from an empty cache."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randperm(33, generator=generator).split(11)
    rows = [
        PagedRow(torch.randint(model.vocab_size, (length,), generator=generator), part)
        for length, part in zip(LENGTHS, blocks, strict=True)
    ]
    caches = [
        (
            torch.full((33, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim), torch.nan),
            torch.full((33, BLOCK_SIZE, spec.num_kv_heads, spec.value_head_dim), torch.nan),
        )
        for spec in model.layer_specs
    ]
    backend = (make_backend or TorchAttentionBackend)(
        model.layer_specs, caches, BLOCK_SIZE, **options
    )
    model.bind(backend)
    for new_tokens in STEPS:
        work = [(row, new) for row, new in zip(rows, new_tokens, strict=True) if new]
        run_step(model, backend, work, BLOCK_SIZE)
    return [torch.cat(row.logits) for row in rows]


def fused(name: str, kernels: CPUKernels, mode: LinearMode) -> tuple[HFModel, FusionReport]:
    model = wrapped(name)
    return model, fuse_layers(model, mode=mode, kernels=kernels)


@each_variant
@pytest.mark.parametrize("name", [*FUSED, *LEFT_ALONE])
def test_logits_are_those_of_the_original(kernels: CPUKernels, name: str) -> None:
    expected = logits(wrapped(name))
    model, report = fused(name, kernels, "deterministic")
    assert report.num_layers == len(model.layer_specs)
    if name in FUSED:
        assert report.num_fused == report.num_layers and not report.reasons
        assert report.linear_kinds == {"packed": 4 * report.num_layers, "two_stage": 1}
    else:
        assert report.num_fused == 0 and set(report.linear_kinds) <= {"packed", "two_stage"}
        assert any(LEFT_ALONE[name] in reason for reason in report.reasons)
    for backend, options in ((CPUAttentionBackend, {"kernels": kernels}), (None, {})):
        for actual, exact in zip(logits(model, backend, **options), expected, strict=True):
            scale = max(exact.abs().max().item(), 1.0)
            torch.testing.assert_close(actual, exact, rtol=0.0, atol=2e-5 * scale)


@each_variant
@pytest.mark.parametrize(("mode", "kind"), [("w8a16", "int8"), ("w8a8", "int8_groups")])
def test_weights_of_eight_bits_come_close(kernels: CPUKernels, mode: LinearMode, kind: str) -> None:
    expected = logits(wrapped("gemma3"))
    model, report = fused("gemma3", kernels, mode)
    assert report.num_fused == 3 and report.linear_kinds == {kind: 13}
    for actual, exact in zip(logits(model), expected, strict=True):
        assert (actual - exact).pow(2).mean().sqrt() < 0.1 * exact.std()


@each_variant
@pytest.mark.parametrize("mode", ["deterministic", "w8a16", "w8a8"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "gemma2_softcap", "gemma3"])
def test_one_call_a_layer_gives_the_bits_of_one_call_a_step(
    kernels: CPUKernels, name: str, mode: LinearMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_steps(*args: Any, **options: Any) -> NotingBackend:
        return NotingBackend(CPUAttentionBackend(*args, **options))

    calls: list[object] = []

    def counted(arguments: object, call: Any = kernels.decoder_layer) -> None:
        calls.append(arguments)
        call(arguments)

    monkeypatch.setattr(kernels, "decoder_layer", counted)
    model, report = fused(name, kernels, mode)
    calls.clear()  # of the probe of the whole pass
    expected = logits(model, in_steps, kernels=kernels)
    assert not calls
    actual = logits(model, CPUAttentionBackend, kernels=kernels)
    assert len(calls) == len(STEPS) * report.num_layers
    assert all(map(torch.equal, actual, expected))


@each_variant
def test_a_row_has_the_same_bits_alone_and_in_company(kernels: CPUKernels) -> None:
    model, _ = fused("gemma3", kernels, "deterministic")
    together = logits(model, CPUAttentionBackend, kernels=kernels)
    generator = torch.Generator().manual_seed(5)
    torch.randperm(33, generator=generator)
    caches = [(torch.zeros(11, BLOCK_SIZE, 2, 8), torch.zeros(11, BLOCK_SIZE, 2, 8))] * 3
    caches = [(k.clone(), v.clone()) for k, v in caches]
    backend = CPUAttentionBackend(model.layer_specs, caches, BLOCK_SIZE, kernels)
    model.bind(backend)
    for expected, length in zip(together, LENGTHS, strict=True):
        token_ids = torch.randint(model.vocab_size, (length,), generator=generator)
        row = PagedRow(token_ids, torch.arange(11))
        for new in [5, 1, 3, *[1] * 31][:length]:
            if row.computed < length:
                run_step(model, backend, [(row, min(new, length - row.computed))], BLOCK_SIZE)
        actual = torch.cat(row.logits)
        assert torch.equal(actual[: len(expected)], expected[: len(actual)])


@each_variant
def test_a_layer_that_computes_something_else_is_left_alone(
    kernels: CPUKernels,
) -> None:
    expected = logits(wrapped("llama"))
    model = wrapped("llama")
    layer = model.module.model.layers[1]
    original = layer.mlp.forward
    layer.mlp.forward = lambda rows: 1.01 * original(rows)
    different = logits(model)
    report = fuse_layers(model, mode="deterministic", kernels=kernels)
    assert report.num_fused == 2
    assert [reason for reason in report.reasons if "differs by" in reason]
    for actual, exact, other in zip(logits(model), different, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=0.0, atol=1e-4)
        assert (actual - other).abs().max() > 1e-3


@each_variant
def test_unknown_parts_are_named(kernels: CPUKernels) -> None:
    model = wrapped("llama")
    layers = model.module.model.layers
    layers[0].mlp.act_fn = torch.nn.ReLU()
    layers[1].input_layernorm.variance_epsilon = 1.0
    layers[1].input_layernorm.forward = torch.nn.Identity().forward
    layers[2].extra = torch.nn.Linear(3, 3)
    report = fuse_layers(model, mode="deterministic", kernels=kernels)
    assert report.num_fused == 0
    for part in ("activation", "input_layernorm is no RMSNorm", "parts beside"):
        assert [reason for reason in report.reasons if part in reason]


@each_variant
def test_a_step_without_samples_gives_no_logits(kernels: CPUKernels) -> None:
    model, _ = fused("llama", kernels, "deterministic")
    head = model.module.get_output_embeddings()
    assert head(torch.zeros(1, 0, 32)).shape == (1, 0, model.vocab_size)


@each_variant
def test_replaced_weights_are_released(kernels: CPUKernels) -> None:
    model, _ = fused("llama", kernels, "deterministic")
    attention = model.module.model.layers[0].self_attn
    assert attention.q_proj.weight.numel() == 0
    assert model.module.get_input_embeddings().weight.numel() > 0


@each_variant
def test_a_model_that_turns_its_logits_around_gets_all_of_them(kernels: CPUKernels) -> None:
    """The largest logit of the product is then not the model's."""
    model = wrapped("llama")
    original = model._model.forward

    def negated(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = -output.logits
        return output

    model._model.forward = negated
    report = fuse_layers(model, mode="deterministic", kernels=kernels)
    assert report.linear_kinds == {"packed": 13}


@each_variant
def test_a_weight_that_only_the_probe_looked_at_whole_is_let_go(
    kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[VocabularyHead] = []

    def noted(*args: Any, **kwargs: Any) -> VocabularyHead:
        heads.append(VocabularyHead(*args, **kwargs))
        return heads[-1]

    monkeypatch.setattr("cbatch_cli.models.fused_head.VocabularyHead", noted)
    model, report = fused("llama", kernels, "deterministic")
    assert report.is_one_pass and [head._all for head in heads] == [None]
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(heads[0].all_logits(rows), rows @ model.head.weight.t())


@each_variant
def test_only_a_step_that_asks_for_it_gets_the_largest_alone(kernels: CPUKernels) -> None:
    model, _ = fused("llama", kernels, "deterministic")
    head = model.module.get_output_embeddings()
    hidden = 9.0 * head.weight[3:5].detach()[None]
    assert head(hidden).isfinite().all()
    model.wants_largest = True
    best, logits = head(hidden)[0], head.weight @ hidden[0].t()
    assert best.shape == (2, 1) and model.largest_ids is not None
    assert model.largest_ids.tolist() == [3, 4]
    torch.testing.assert_close(best[:, 0], logits.amax(dim=0))
