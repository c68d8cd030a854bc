"""Layers fused over our Triton kernels, interpreted, against transformers' own code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.models.fused_norm import Norm, NormStep
from cbatch_cli.models.fused_torch import TorchOperations
from cbatch_cli.models.fused_triton import TritonOperations
from cbatch_cli.models.fusion import FusionReport, fuse_layers
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.step_observation import observe_step
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.fused_models import EVERY_DTYPE, HALF, SHORT_STEPS, fused_as_exactly, tiny
from tests.tiny_models import VOCAB_SIZE


def assert_whole(report: FusionReport) -> None:
    assert report.operations == "triton"
    assert report.num_fused == report.num_layers and not report.reasons
    assert report.parts["norms"].num_fused == 1


# glm rotates neighbours in pairs, a part of each head; smollm3 has a layer that does not rotate.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama", dtype) for dtype in EVERY_DTYPE),
        *(("gemma3", dtype) for dtype in EVERY_DTYPE),
        ("qwen3", torch.bfloat16),
        ("phi3", torch.bfloat16),
        ("glm", torch.float32),
        ("smollm3", torch.float32),
    ],
)
def test_layers_are_as_exact_as_the_originals(name: str, dtype: torch.dtype) -> None:
    assert_whole(fused_as_exactly(name, dtype, TritonOperations(), steps=SHORT_STEPS))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3_unequal_dims"])
def test_parts(name: str) -> None:
    """Norms of heads that are part of longer rows among them."""
    report = fused_as_exactly(name, torch.float32, TritonOperations(), steps=SHORT_STEPS)
    assert report.num_fused == 0 and report.parts["norms"].num_fused == 13
    assert not any(part.reasons for part in report.parts.values())


def test_norms_of_rows_that_lie_apart() -> None:
    norm = Norm(weight=torch.rand(16), offset=0.0, epsilon=1e-5, rounds_before_weight=False)
    rows = torch.randn(1, 5, 6, 24)[..., :16]
    for states in (
        rows,
        rows.transpose(1, 2),
        rows[:, :, 0],
        rows[0, :, 0],
        torch.randn(2, 3, 5, 24)[..., :16],
        torch.randn(1, 16, 4).mT,
    ):
        assert not states.is_contiguous()
        expected = TorchOperations().norm(norm)(states)
        torch.testing.assert_close(TritonOperations().norm(norm)(states), expected)


class Flipped(TritonOperations):
    """Rounds where it should not, and does not where it should."""

    def norm(self, norm: Norm) -> NormStep:
        is_flipped = not norm.rounds_before_weight
        return super().norm(dataclasses.replace(norm, rounds_before_weight=is_flipped))


@pytest.mark.parametrize(("name", "dtype"), [("llama", HALF[0]), ("gemma3", HALF[1])])
def test_the_wrong_casting_order_is_refused(name: str, dtype: torch.dtype) -> None:
    report = fuse_layers(tiny(name, dtype=dtype), operations=Flipped())
    assert report.num_fused == 0 and report.parts["norms"].num_fused == 0
    assert all("rounded otherwise" in reason for reason in report.reasons)


@pytest.mark.parametrize(("name", "number"), [("llama", 9), ("qwen3", 11), ("gemma3", 13)])
def test_operations_per_layer(name: str, number: int) -> None:
    """Beside attention, which takes two to four."""
    model = tiny(name)
    model.attention_backend = "triton"
    assert fuse_layers(model).operations == "triton"
    step = observe_step(model, None)
    both = zip(step.operations_per_layer, step.attention_operations, strict=True)
    assert {total - of_attention for total, of_attention in both} == {number}
    assert set(step.attention_operations) == {4}
    assert step.operations[0]["cbatch::rope"] == 1


def generate(model: HFModel) -> dict[int, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            ),
            params=SamplingParams(max_tokens=3, ignore_eos=True),
        )
        for row, length in enumerate((1, 17))
    ]
    config = EngineConfig(
        device="cpu", block_size=16, num_kv_blocks=24, max_num_seqs=3, max_num_batched_tokens=24
    )
    core, _ = build_core(model, config)
    outputs = {output.key.row: output for output in core.generate(requests)}
    assert all(output.error is None for output in outputs.values())
    return {row: tuple(output.token_ids) for row, output in outputs.items()}


def test_the_engine_makes_the_same_tokens() -> None:
    expected = generate(tiny("llama"))
    on_torch = tiny("llama")
    assert fuse_layers(on_torch).operations == "torch"
    assert generate(on_torch) == expected
    on_triton = tiny("llama")
    on_triton.attention_backend = "triton"
    assert fuse_layers(on_triton).operations == "triton"
    assert generate(on_triton) == expected
