"""Layers fused over torch's operations, in every dtype, and what the probe refuses."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models import fusion
from cbatch_cli.models.fused_norm import Norm, NormStep
from cbatch_cli.models.fused_operations import AddStep, HeadNorms, HeadsStep, Rotation
from cbatch_cli.models.fused_torch import TorchOperations
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.step_observation import observe_step
from tests.fused_models import EVERY_DTYPE, HALF, fused_as_exactly, tiny
from tests.tiny_models import model_of

# glm rotates neighbours in pairs, a part of each head; smollm3 has a layer that does not rotate.
WHOLE = ("llama", "mistral_window", "qwen2", "qwen3", "gemma2_softcap", "gemma3", "phi3")
WHOLE_IN_FLOAT32 = ("glm", "ernie4_5", "smollm3")


def assert_whole(report: FusionReport, operations: str = "torch") -> None:
    assert report.operations == operations
    assert report.num_fused == report.num_layers and not report.reasons
    assert report.linear_kinds == {"torch": 4 * report.num_layers}
    assert {kind: part.num_fused for kind, part in report.parts.items()} == {"norms": 1}


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("name", WHOLE)
def test_layers_are_as_exact_as_the_originals(name: str, dtype: torch.dtype) -> None:
    assert_whole(fused_as_exactly(name, dtype, TorchOperations()))


@pytest.mark.parametrize("name", WHOLE_IN_FLOAT32)
def test_other_rotations(name: str) -> None:
    assert_whole(fused_as_exactly(name, torch.float32, TorchOperations()))


def test_float64_is_left_alone() -> None:
    report = fuse_layers(tiny("llama", dtype=torch.float64))
    assert report.num_fused == 0 and report.reasons == {"float64 is not fused": 3}


# Faults in what fuses.


def flipped(norm: Norm | None) -> Norm | None:
    if norm is None:
        return None
    return dataclasses.replace(norm, rounds_before_weight=not norm.rounds_before_weight)


def without_offset(norm: Norm | None) -> Norm | None:
    return None if norm is None else dataclasses.replace(norm, offset=0.0)


class Changed(TorchOperations):
    """Operations whose norms are changed, all of them or those of one step."""

    def __init__(self, change: Callable[[Norm | None], Norm | None], where: str) -> None:
        self._change, self._where = change, where

    def _changed(self, norm: Norm | None, where: str) -> Norm | None:
        return self._change(norm) if where == self._where else norm

    def norm(self, norm: Norm) -> NormStep:
        changed = self._changed(norm, "norm")
        assert changed is not None
        return super().norm(changed)

    def add(self, *, added_norm: Norm | None, norm: Norm | None, owns_residual: bool) -> AddStep:
        plain = TorchOperations()
        return plain.add(
            added_norm=self._changed(added_norm, "added"),
            norm=self._changed(norm, "sum"),
            owns_residual=owns_residual,
        )

    def heads(self, spec: LayerSpec, *, norms: HeadNorms | None, rotation: Rotation) -> HeadsStep:
        if norms is not None:
            query_norm, key_norm = (self._changed(norm, "heads") for norm in norms)
            assert query_norm is not None and key_norm is not None
            norms = (query_norm, key_norm)
        return super().heads(spec, norms=norms, rotation=rotation)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("name", "where", "reason"),
    [
        ("llama", "norm", "layernorm is rounded otherwise than by the fused norm"),
        ("llama", "sum", "the norm of that sum is rounded otherwise in"),
        ("gemma3", "norm", "norm is rounded otherwise than by the fused norm"),
        ("gemma3", "sum", "the norm of that sum is rounded otherwise in"),
        ("gemma3", "added", "its sum with the attention's output is rounded otherwise in"),
    ],
)
def test_the_wrong_casting_order_is_refused(
    name: str, where: str, reason: str, dtype: torch.dtype
) -> None:
    report = fuse_layers(tiny(name, dtype=dtype), operations=Changed(flipped, where))
    assert report.num_fused == 0 and all(reason in other for other in report.reasons)
    if where == "norm":
        assert all(part.num_fused == 0 for kind, part in report.parts.items() if kind == "norms")


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("where", ["norm", "sum", "added", "heads"])
def test_a_missing_offset_is_refused(where: str, dtype: torch.dtype) -> None:
    report = fuse_layers(tiny("gemma3", dtype=dtype), operations=Changed(without_offset, where))
    assert report.num_fused == 0


class SwappedGate(TorchOperations):
    """Takes up for gate."""

    def activation(self, activation: Any) -> Callable[[Tensor], Tensor]:
        step = super().activation(activation)
        return lambda gate_up: step(gate_up.roll(gate_up.shape[1] // 2, dims=1))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_gate_and_up_the_wrong_way_around_are_refused(name: str, dtype: torch.dtype) -> None:
    report = fuse_layers(tiny(name, dtype=dtype), operations=SwappedGate())
    assert report.num_fused == 0 and report.parts["mlps"].num_fused == 0
    assert all("mlp differs by" in reason for reason in report.reasons)


def test_the_wrong_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_ROTATIONS", ("pairs", "none"))
    report = fuse_layers(tiny("llama", dtype=torch.bfloat16))
    assert report.num_fused == 0
    assert all("its attention differs by" in reason for reason in report.reasons)


# Models that are not what they look like.


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_one_percent_more_is_seen(part: str, dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    module = getattr(model.module.model.layers[1], part)
    own_forward = module.forward

    def more(*args: Any, **kwargs: Any) -> Any:
        output = own_forward(*args, **kwargs)
        return 1.01 * output if part == "mlp" else (1.01 * output[0], *output[1:])

    module.forward = more
    report = fuse_layers(model)
    assert report.num_fused == 2 and any("differs by" in reason for reason in report.reasons)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_residual_that_is_scaled_is_seen(dtype: torch.dtype) -> None:
    model = tiny("granite", dtype=dtype)
    assert model.module.config.residual_multiplier == 1.0
    for layer in model.module.model.layers:
        layer.residual_multiplier = 0.98
    report = fuse_layers(model)
    assert report.num_fused == 0 and report.parts["mlps"].num_fused == report.num_layers


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_an_output_that_is_scaled_is_seen(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    layer = model.module.model.layers[1]
    own_forward = layer.forward
    layer.forward = lambda *args, **kwargs: 1.02 * own_forward(*args, **kwargs)
    report = fuse_layers(model)
    assert report.num_fused == 2
    assert all("the fused layer differs by" in reason for reason in report.reasons)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_queries_that_are_scaled_at_late_positions_are_seen(dtype: torch.dtype) -> None:
    model = tiny("llama", dtype=dtype)
    assert model.max_model_len == 100
    given: dict[str, Tensor] = {}
    model.module.register_forward_pre_hook(
        lambda _, __, kwargs: given.update(positions=kwargs["position_ids"]), with_kwargs=True
    )
    projection = model.module.model.layers[0].self_attn.q_proj
    own_forward = projection.forward

    def scaled(hidden: Tensor) -> Tensor:
        scale = torch.where(given["positions"] > 95, 1.5, 1.0)[..., None]
        return own_forward(hidden) * scale.to(dtype)

    projection.forward = scaled
    report = fuse_layers(model)
    assert report.num_fused == 2 and report.parts["projections"].num_fused == 0


# Weights exist once.


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made meanwhile, and those of `model`, took at any time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._tensors = [weakref.ref(weight) for weight in model.parameters()]
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        self._tensors += [weakref.ref(value) for value in made if isinstance(value, Tensor)]
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        self._tensors = [weakref.ref(tensor) for tensor in alive]
        self.peak = max(self.peak, num_bytes(alive))
        return result


def num_bytes(tensors: list[Tensor]) -> int:
    """Of the storages of some tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_never_held_twice(dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    model = HFModel(
        model_of(config, dtype=dtype),
        max_model_len=100,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
    before = num_bytes(list(model.module.parameters()))
    with PeakBytes(model.module) as measured:
        report = fuse_layers(model)
    assert report.num_fused == 8
    assert num_bytes(list(model.module.parameters())) == before
    # Gate, up, queries, keys and values of one layer are a tenth of all; the rest is the probe's.
    assert measured.peak < 1.4 * before
    for layer in model.module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ):
            weights = [linear.weight for linear in linears]
            assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
            assert num_bytes(weights) == sum(w.numel() * w.element_size() for w in weights)


def test_the_layers_own_code_still_works_on_the_merged_weights() -> None:
    model = tiny("qwen2", dtype=torch.bfloat16)
    token_ids = torch.arange(20)
    expected = model.eager_logits(token_ids, token_ids)
    assert fuse_layers(model).num_fused == 3
    for module in model.module.modules():
        vars(module).pop("forward", None)
    assert torch.equal(model.eager_logits(token_ids, token_ids), expected)


def test_weights_of_several_layers_are_left_where_they_are() -> None:
    model = tiny("llama")
    layers = model.module.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    report = fuse_layers(model)
    assert report.num_fused == 1
    assert report.reasons == {"its weights are shared with other layers": 2}
    assert layers[2].mlp.up_proj.weight is layers[0].mlp.up_proj.weight


# Operations of a layer, attention's own left out.


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("llama", torch.float32, 20),
        ("qwen3", torch.float32, 24),
        ("gemma3", torch.float32, 32),
        ("llama", torch.bfloat16, 22),
        ("qwen3", torch.bfloat16, 27),
        ("gemma3", torch.bfloat16, 32),
    ],
)
def test_operations_per_layer(name: str, dtype: torch.dtype, most: int) -> None:
    model = tiny(name, dtype=dtype)
    counts = []
    for is_fused in (False, True):
        if is_fused:
            fuse_layers(model)
        step = observe_step(model, None)
        both = zip(step.operations_per_layer, step.attention_operations, strict=True)
        counts.append([total - of_attention for total, of_attention in both])
    assert max(counts[1]) <= most < 0.65 * min(counts[0])


def test_a_linear_layer_of_another_kind_is_left_alone() -> None:
    model = tiny("llama")

    class Other(nn.Linear):
        pass

    model.module.model.layers[0].mlp.down_proj.__class__ = Other
    report = fuse_layers(model)
    assert report.reasons == {"down_proj are no plain linear layers": 1}
