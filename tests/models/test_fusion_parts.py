"""Parts of layers that cannot be fused as a whole, and what is left alone of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cbatch_kernels.cpu_linear import TorchLinear
from torch import Tensor, nn

from cbatch_cli.models.fused_linear import SharedProduct, WeightMerger
from cbatch_cli.models.fused_norm import NotFusable
from cbatch_cli.models.fused_torch import TorchOperations
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from tests.fused_models import EVERY_DTYPE, fused_as_exactly, tiny
from tests.packed_steps import packed_logits

# Found and fused: a mixture of experts beside its shared MLP, norms after the parts, queries and
# keys of latent attention, one norm for both branches, no gate.
PARTS = {
    "mixtral": {"norms": 7, "projections": 3},
    "qwen3_moe": {"norms": 13, "projections": 3},
    "gpt_oss_sinks": {"norms": 7, "projections": 3},
    "deepseek_v3_unequal_dims": {"norms": 13, "mlps": 3, "projections": 3},
    "olmo2": {"norms": 13, "mlps": 3, "projections": 3},
    "cohere2": {"norms": 0, "mlps": 3, "projections": 3},
    "gemma4_text": {"norms": 28, "mlps": 4, "projections": 2},
    "opt": {"norms": 0, "projections": 3},
    "gpt2": {"norms": 0},
}


def fused(report: FusionReport) -> dict[str, int]:
    return {kind: part.num_fused for kind, part in report.parts.items()}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_fused_and_nothing_changes(name: str) -> None:
    report = fused_as_exactly(name, torch.float32, TorchOperations())
    assert report.num_fused == 0 and sum(report.reasons.values()) == report.num_layers
    assert fused(report) == PARTS[name]
    for part in report.parts.values():
        assert part.num_found == part.num_fused + sum(part.reasons.values())
    num_products = 2 * PARTS[name].get("mlps", 0) + PARTS[name].get("projections", 0)
    assert sum(report.linear_kinds.values()) == num_products


@pytest.mark.parametrize("dtype", EVERY_DTYPE[1:])
@pytest.mark.parametrize("name", ["olmo2", "deepseek_v3_unequal_dims"])
def test_parts_in_half_precision(name: str, dtype: torch.dtype) -> None:
    if name == "olmo2":
        assert fused(fused_as_exactly(name, dtype, TorchOperations())) == PARTS[name]
    else:  # other experts may be chosen, so that single logits say nothing
        assert fused(fuse_layers(tiny(name, dtype=dtype))) == PARTS[name]


def test_why_parts_are_left_alone() -> None:
    reasons = fuse_layers(tiny("gpt2")).parts["norms"].reasons
    assert reasons == {f"{name} is no RMSNorm": count for name, count in NORMS_OF_GPT2.items()}
    mlps = fuse_layers(tiny("arcee")).parts["mlps"]
    assert mlps.num_fused == 0
    assert mlps.reasons == {"its activation is neither silu nor gelu in its tanh form": 3}


NORMS_OF_GPT2 = {"ln_1": 2, "ln_2": 2, "ln_f": 1}


def with_more(model: HFModel) -> nn.Module:
    """The first layer, made unfusable as a whole."""
    layer: nn.Module = model.module.model.layers[0]
    layer.more = nn.Linear(1, 1)
    return layer


def logits(model: HFModel) -> Tensor:
    return packed_logits(model, [torch.arange(30)], [(29,), (1,)], block_size=4)[0]


def test_each_part_is_judged_apart() -> None:
    model = tiny("llama")
    layer = with_more(model)
    own_norm, own_mlp = layer.input_layernorm.forward, layer.mlp.forward
    layer.input_layernorm.forward = lambda hidden: 1.01 * own_norm(hidden)
    layer.mlp.forward = lambda hidden: own_mlp(hidden).neg()
    expected = logits(model)
    report = fuse_layers(model)
    assert report.num_fused == 2
    assert fused(report) == {"norms": 2, "mlps": 0, "projections": 1 + 1}
    assert "input_layernorm is no RMSNorm" in report.parts["norms"].reasons
    assert list(report.parts["mlps"].reasons) == ["it differs by 2 of its output"]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_is_judged_by_the_rows_of_the_model_too() -> None:
    model = tiny("llama")
    norm = with_more(model).input_layernorm
    own_norm = norm.forward
    norm.forward = lambda hidden: own_norm(hidden) * (1.01 if hidden.dim() == 3 else 1.0)
    norms = fuse_layers(model).parts["norms"]
    assert norms.num_fused == 2 and norms.reasons == {"it differs by 0.01 of its output": 1}


def test_a_part_that_is_given_more_is_left_alone() -> None:
    model = tiny("llama")
    layer = with_more(model)
    own_mlp = layer.mlp.forward
    layer.mlp.forward = lambda hidden, scale=1.0: own_mlp(hidden) * scale
    own_call = type(layer.mlp).__call__
    expected = logits(model)

    class Scaled(type(layer.mlp)):  # type: ignore[misc]
        def __call__(self, hidden: Tensor) -> Any:
            return own_call(self, hidden, scale=1.0)

    layer.mlp.__class__ = Scaled
    report = fuse_layers(model)
    assert report.parts["mlps"].reasons == {"it is not given one tensor alone": 1}
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_code_that_needs_rows_of_its_own_keeps_its_projections() -> None:
    model = tiny("llama")
    layer = with_more(model)
    attention = layer.self_attn
    own_forward = attention.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        assert attention.q_proj(hidden_states).view(-1).dim() == 1
        return own_forward(hidden_states=hidden_states, **kwargs)

    attention.forward = forward
    expected = logits(model)
    report = fuse_layers(model)
    assert fused(report) == {"norms": 0, "mlps": 0, "projections": 0}
    (reason,) = report.parts["projections"].reasons
    assert reason.startswith("the model's code fails: view size is not compatible")
    assert report.linear_kinds == {"torch": 8}, "those of the two whole layers"
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_parts_that_change_the_logits_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mixtral")
    expected = logits(model)
    own_part = SharedProduct.part

    def worn(shared: SharedProduct, index: int) -> Any:
        calls: list[int] = []
        forward = own_part(shared, index)

        def wearing(hidden: Tensor) -> Tensor:
            calls.append(index)
            return forward(hidden) * (1.0 if len(calls) == 1 else 0.9)

        return wearing

    monkeypatch.setattr(SharedProduct, "part", worn)
    report = fuse_layers(model)
    assert fused(report) == {"norms": 0, "projections": 0}
    assert list(report.parts["norms"].reasons)[0].startswith("the model's logits differ by")
    assert torch.equal(logits(model), expected)


# The product of several layers.


def linears(*sizes: int, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=bias).requires_grad_(False) for size in sizes]


@pytest.mark.parametrize("bias", [False, True])
def test_each_takes_its_columns_in_any_order(bias: bool) -> None:
    layers = linears(4, 2, 3, bias=bias)
    if bias:
        layers[1].bias = None
    rows = [torch.randn(1, 5, 8), torch.randn(1, 5, 8)]
    expected = [[layer(hidden) for layer in layers] for hidden in rows]
    calls: list[int] = []
    product = TorchLinear(*WeightMerger(nn.ModuleList(layers)).merge(layers))

    def counted(hidden: Tensor) -> Tensor:
        calls.append(1)
        return product(hidden)

    shared = SharedProduct(counted, [4, 2, 3])
    parts = [shared.part(index) for index in range(3)]
    for hidden, wanted in zip(rows, expected, strict=True):
        for index in (2, 0, 1):
            torch.testing.assert_close(parts[index](hidden), wanted[index])
    assert len(calls) == 2 and shared._hidden is None and not shared._columns
    # Another tensor in between, and the same layer twice.
    for index, which in ((0, 0), (1, 1), (1, 0), (0, 0), (0, 0), (2, 0)):
        torch.testing.assert_close(parts[index](rows[which]), expected[which][index])


def test_a_merged_weight_is_used_again() -> None:
    layers = linears(4, 2)
    merger = WeightMerger(nn.ModuleList(layers))
    first, _ = merger.merge(layers)
    again, _ = merger.merge(layers)
    assert first.data_ptr() == again.data_ptr() and torch.equal(first, again)
    other, _ = merger.merge(layers[::-1])
    assert torch.equal(other, torch.cat([layers[1].weight, layers[0].weight]))


def test_shared_weights_are_not_merged() -> None:
    layers = linears(4, 4)
    layers[1].weight = layers[0].weight
    with pytest.raises(NotFusable, match="shared"):
        WeightMerger(nn.ModuleList(layers)).merge(layers[:1])
