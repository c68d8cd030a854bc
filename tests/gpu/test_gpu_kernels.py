"""On a GPU: every kernel against float64, in every dtype that the card has."""

from __future__ import annotations

import pytest
import torch

from cbatch_cli.bench.gpu_kernels import AttentionSizes, AttentionStep, kernel_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_are_as_close_as_rounding_allows(dtype: torch.dtype, head_dim: int) -> None:
    found = list(kernel_errors(CUDA, [dtype], head_dims=[head_dim]))
    assert [(entry.name, entry.value) for entry in found if not entry.is_met] == []


@pytest.mark.parametrize("context_len", [1, 511, 512, 513, 5000])
@pytest.mark.parametrize("num_seqs", [1, 3, 200])
def test_decodes_in_any_number_of_splits(num_seqs: int, context_len: int) -> None:
    sizes = AttentionSizes(num_kv_heads=1, group_size=4, head_dim=64)
    lengths = [(context_len - 1, 1)] * num_seqs
    step = AttentionStep(lengths, sizes, device=CUDA, dtype=torch.float32)
    difference = (step.run().cpu().double() - step.expected()).norm() / step.expected().norm()
    assert float(difference) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_decoded_alone_and_in_a_chunk(dtype: torch.dtype) -> None:
    """The last token of a row, decoded beside others, and as part of chunks of many sizes."""
    sizes = AttentionSizes(num_kv_heads=2, group_size=4, head_dim=128)
    outputs = []
    for lengths in ([(699, 1)], [(699, 1), (40, 1), (0, 30)], [(690, 10)], [(100, 600)]):
        step = AttentionStep(lengths, sizes, device=CUDA, dtype=dtype, deterministic=True)
        # The same row in all of them: what is cached, what is stored, and what asks.
        generator = torch.Generator().manual_seed(7)
        keys, values = (torch.randn(700, 2, 128, generator=generator) for _ in range(2))
        query = torch.randn(8, 128, generator=generator)
        positions = torch.arange(700)
        blocks = step.tables[0, positions // 16].long().to(CUDA)
        step.k_cache[blocks, (positions % 16).to(CUDA)] = keys.to(CUDA, dtype)
        step.v_cache[blocks, (positions % 16).to(CUDA)] = values.to(CUDA, dtype)
        new = lengths[0][1]
        step.key[:new] = keys[-new:].to(CUDA, dtype)
        step.value[:new] = values[-new:].to(CUDA, dtype)
        step.query[new - 1] = query.to(CUDA, dtype)
        outputs.append(step.run()[new - 1].clone())
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
