"""The GPU suite's kernels and rates on tiny shapes; what it measures here is no speed."""

from __future__ import annotations

import torch

from cbatch_cli.bench.gpu_kernels import (
    AttentionSizes,
    AttentionStep,
    decode_rate,
    kernel_errors,
    prefill_rate,
)

CPU = torch.device("cpu")
LENGTHS = [(40, 1), (3, 9)]
SMALL = AttentionSizes(num_kv_heads=1, group_size=2, head_dim=16)


def test_every_kernel_is_compared_and_close() -> None:
    found = {
        m.name: m for m in kernel_errors(CPU, [torch.float32], head_dims=[16], lengths=LENGTHS)
    }
    assert all(measurement.is_met for measurement in found.values()), found
    kv_dtypes = ("float32", "float8_e4m3fn", "float8_e5m2")
    assert set(found) == {
        *(f"attention 16 float32, KV {kv_dtype}" for kv_dtype in kv_dtypes),
        *(f"attention 16 float32, KV {kv_dtype}, window, cap, sinks" for kv_dtype in kv_dtypes),
        *(f"{kernel} float32" for kernel in ("linear", "norm", "rope", "activation")),
    }


def test_a_wrong_kernel_is_seen() -> None:
    step = AttentionStep(LENGTHS, SMALL, device=CPU, dtype=torch.float32)
    output, expected = step.run(), step.expected()
    assert float((output.double() - expected).norm() / expected.norm()) < 1e-5
    step.v_cache += 0.01
    assert float((output.double() - step.expected()).norm() / expected.norm()) > 1e-3


def test_what_a_step_reads_and_computes() -> None:
    sizes = AttentionSizes(num_kv_heads=2, group_size=3, head_dim=16)
    step = AttentionStep([(9, 1), (4, 1)], sizes, device=CPU, dtype=torch.float32)
    assert step.num_bytes == (10 + 5) * 2 * 2 * 16 * 4
    step = AttentionStep([(2, 3)], sizes, device=CPU, dtype=torch.float32)
    assert step.num_flops == (3 + 4 + 5) * 6 * 16 * 4


def test_rates_are_measured() -> None:
    common = {"device": CPU, "dtype": torch.float32, "num_calls": 1}
    assert decode_rate(SMALL, num_seqs=1, context_len=17, **common) > 0  # type: ignore[arg-type]
    assert prefill_rate(SMALL, prompt_len=5, **common) > 0  # type: ignore[arg-type]
