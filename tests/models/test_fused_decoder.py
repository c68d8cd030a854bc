"""A forward pass without transformers' code around the layers, where that does nothing else."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels, load_kernels
from torch import Tensor, nn

from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.fusion import fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import first_step_metadata, layer_caches
from tests.cpu_variants import each_variant
from tests.models.test_families import wrapped
from tests.tiny_models import CONFIGS, model_of

LENGTHS = (1, 9, 4)
SAMPLED = torch.tensor([13, 0, 4])


def logits(
    model: HFModel, make_backend: Callable[..., Any], *options: Any, sampled: Tensor = SAMPLED
) -> Tensor:
    """Of three rows from their start; binds a new backend."""
    caches = layer_caches(model, num_blocks=3, block_size=16, value=torch.nan)
    backend = make_backend(model.layer_specs, caches, 16, *options)
    backend.begin_step([first_step_metadata(LENGTHS, 16, model.device)])
    model.bind(backend)
    token_ids = torch.randint(
        model.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model.forward(token_ids, positions, sampled)


def forbid(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers' forward pass ran")

    monkeypatch.setattr(module, "forward", forward)


def model_of_layers(name: str, num_layers: int) -> HFModel:
    config = CONFIGS[name]()
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i % 3] for i in range(num_layers)]
    return HFModel(
        model_of(config), max_model_len=512, eos_token_ids=frozenset(), generation_defaults={}
    )


@each_variant
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "gemma3", "phi3"])
def test_logits_are_transformers_own_and_its_pass_does_not_run(
    kernels: CPUKernels, name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(model_of_layers(name, num_layers), TorchAttentionBackend)
    model = model_of_layers(name, num_layers)
    report = fuse_layers(model, mode="deterministic", kernels=kernels)
    assert report.is_one_pass and report.num_layers == num_layers
    forbid(model.module, monkeypatch)
    actual = logits(model, CPUAttentionBackend, kernels)
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-5 * scale)
    assert logits(
        model, CPUAttentionBackend, kernels, sampled=torch.empty(0, dtype=torch.int64)
    ).shape == (0, model.vocab_size)


def test_other_backends_run_in_transformers_own_pass() -> None:
    kernels = load_kernels()
    model = wrapped("gemma3")
    own = logits(model, TorchAttentionBackend)
    assert fuse_layers(model, mode="deterministic", kernels=kernels).is_one_pass
    calls: list[object] = []
    model.module.register_forward_hook(lambda *args: calls.append(args))
    for backend, options, num_calls in (
        (CPUAttentionBackend, (kernels,), 0),
        (TorchAttentionBackend, (), 1),
        (CPUAttentionBackend, (kernels,), 1),
    ):
        torch.testing.assert_close(logits(model, backend, *options), own, rtol=0.0, atol=2e-5)
        assert len(calls) == num_calls


def test_the_pass_lets_go_of_the_backend() -> None:
    kernels = load_kernels()
    model = wrapped("llama")
    fuse_layers(model, mode="deterministic", kernels=kernels)
    caches = layer_caches(model, num_blocks=1, block_size=16, value=0.0)
    backend = CPUAttentionBackend(model.layer_specs, caches, 16, kernels)
    model.bind(backend)
    held = weakref.ref(backend)
    model.unbind()
    del backend, caches
    gc.collect()
    assert held() is None


def scale_before_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))


def scale_the_embedding(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))


def scale_before_the_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))


def scale_before_the_norm(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda _, args: (0.5 * args[0] + 1.0,))


def cap_the_logits(model: Any) -> None:
    def cap(_: object, __: object, output: Any) -> Any:
        output.logits = 30.0 * torch.tanh(output.logits / 30.0)
        return output

    model.register_forward_hook(cap)


def count_passes(model: Any) -> None:
    """Rotations that no two passes share."""
    own, count = model.model.rotary_emb.forward, itertools.count()

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        factor = 1.0 + 0.1 * next(count)
        return tuple(factor * table for table in own(x, position_ids))

    model.model.rotary_emb.forward = forward


@pytest.mark.parametrize(
    "change",
    [
        scale_the_embedding,
        scale_before_a_layer,
        scale_before_the_norm,
        scale_before_the_head,
        cap_the_logits,
        count_passes,
    ],
)
def test_a_pass_that_does_more_stays_transformers_own(change: Callable[[Any], None]) -> None:
    kernels = load_kernels()
    model = wrapped("llama")
    change(model.module)
    own = logits(model, TorchAttentionBackend)
    report = fuse_layers(model, mode="deterministic", kernels=kernels)
    assert report.num_fused == 3 and not report.is_one_pass
    if change is not count_passes:
        fused = logits(model, CPUAttentionBackend, kernels)
        torch.testing.assert_close(fused, own, rtol=0.0, atol=5e-5)


def test_a_layer_that_is_not_fused_leaves_the_pass_alone() -> None:
    model = wrapped("llama")
    model.module.model.layers[1].mlp.act_fn = nn.Tanh()
    report = fuse_layers(model, mode="deterministic", kernels=load_kernels())
    assert report.num_fused == 2 and not report.is_one_pass
