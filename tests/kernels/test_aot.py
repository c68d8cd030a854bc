"""The real compiler accepts every kernel, for cards that need not be there.

Each test compiles what the wrappers launch and prints one line per kernel: registers, spills,
shared memory, tensor cores (seen with `pytest -s`). What must hold is what keeps a kernel fast:
little or nothing spilled, shared memory that fits, and the tensor cores of the architecture.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("triton is interpreting in this process", allow_module_level=True)

from tests.kernels.kernel_table import launches_of, table
from tests.kernels.launches import SHARED_MEMORY_KB, TARGETS, Launch, compile_launch
from tests.kernels.variants import (
    FP8_DTYPES,
    HEAD_DIMS,
    AttentionVariant,
    attention_launches,
    grid,
    layer_launches,
    linear_launches,
    sampling_launches,
    store_launches,
)

pytestmark = pytest.mark.kernels

PREFILL_TENSOR_CORES = {
    "sm_80": {"HMMA"},
    "sm_89": {"HMMA"},
    "sm_90": {"WGMMA", "HGMMA"},
    "sm_100": {"UTCHMMA", "UTCMMA"},
    "gfx942": {"v_mfma"},
}


def check(label: str, launch: Launch, arch: str, folder: Path, *, allowed_spills: int = 0) -> None:
    compiled = compile_launch(launch, arch, folder)
    print(
        f"{arch:7} {launch.name:20} {label:34} registers {compiled.registers:3}  "
        f"spilled {compiled.spilled:2}  shared {compiled.shared_kb:5.1f} KB  "
        f"{'128-bit loads' if compiled.has_wide_loads else '':13} {' '.join(compiled.tensor_cores)}"
    )
    assert compiled.spilled <= allowed_spills, (label, launch.name)
    assert compiled.shared_kb <= SHARED_MEMORY_KB[arch], (label, launch.name)
    uses_tensor_cores = "query" in launch.arguments and "seq_lens" in launch.arguments
    if launch.name == "linear" and launch.arguments["states"].dtype != torch.float32:
        assert compiled.has_wide_loads
        assert PREFILL_TENSOR_CORES[arch] & set(compiled.tensor_cores)
    if uses_tensor_cores and launch.arguments["query"].dtype != torch.float32:
        assert compiled.has_wide_loads
        assert compiled.tensor_cores
        if launch.name == "paged_prefill" and launch.arguments["BLOCK_M"] > 16:
            assert PREFILL_TENSOR_CORES[arch] & set(compiled.tensor_cores)


def check_attention(variant: AttentionVariant, arch: str, folder: Path) -> None:
    is_older = arch in ("sm_80", "sm_89")
    for launch in attention_launches(variant, arch):
        # Widening eight bits and products of float32 take registers, which is for newer cards.
        is_hard = variant.kv_dtype or variant.features == "all" or variant.dtype == torch.float32
        allowed = 16 if is_older and is_hard else 0
        check(variant.label, launch, arch, folder, allowed_spills=allowed)


@pytest.mark.parametrize("arch", TARGETS)
def test_attention_of_common_models(arch: str, tmp_path: Path) -> None:
    check_attention(AttentionVariant(head_dim=128, features="all"), arch, tmp_path)


@pytest.mark.parametrize(
    "variant",
    [
        AttentionVariant(head_dim=128),
        AttentionVariant(head_dim=256, features="all"),
        AttentionVariant(head_dim=128, kv_dtype=torch.float8_e4m3fn),
    ],
    ids=lambda variant: variant.label,
)
def test_attention_on_hopper(variant: AttentionVariant, tmp_path: Path) -> None:
    check_attention(variant, "sm_90", tmp_path)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_kernels(arch: str, tmp_path: Path) -> None:
    check_others(torch.bfloat16, arch, tmp_path)


def check_others(dtype: torch.dtype, arch: str, folder: Path) -> None:
    label = str(dtype).removeprefix("torch.")
    launches = layer_launches(dtype) + linear_launches(dtype, arch) + sampling_launches()
    for head_dim in (80, 128):
        for kv_dtype in (dtype, *FP8_DTYPES[arch]):
            launches += store_launches(dtype, kv_dtype, head_dim)
    for launch in launches:
        check(label, launch, arch, folder)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch", TARGETS)
def test_attention_everywhere(arch: str, head_dim: int, tmp_path: Path) -> None:
    for variant in grid(arch):
        if variant.head_dim == head_dim:
            check_attention(variant, arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 7, 8])
@pytest.mark.parametrize("few_queries", [False, True])
@pytest.mark.parametrize("arch", TARGETS)
def test_groups_and_small_tiles(
    arch: str, few_queries: bool, group_size: int, tmp_path: Path
) -> None:
    variant = AttentionVariant(head_dim=128, group_size=group_size, few_queries=few_queries)
    check_attention(variant, arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", TARGETS)
def test_small_tiles_over_caches_of_eight_bits(arch: str, head_dim: int, tmp_path: Path) -> None:
    variant = AttentionVariant(
        head_dim=head_dim, kv_dtype=FP8_DTYPES[arch][0], features="all", few_queries=True
    )
    check_attention(variant, arch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("arch", TARGETS)
def test_other_kernels_everywhere(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_others(dtype, arch, tmp_path)


def test_the_page_of_kernels_shows_the_worst_of_each() -> None:
    """`python -m tests.kernels.kernel_table` writes it."""
    shared = {"arch": "sm_90", "kernel": "linear"}
    results = [
        {**shared, "registers": 90, "shared_kb": 96.0, "spilled": 0, "tensor_cores": ["HGMMA"]},
        {**shared, "registers": 120, "shared_kb": 16.0, "spilled": 3, "tensor_cores": []},
    ]
    assert table(results).endswith("| sm_90 | linear | 2 | 120 | 96.0 | 3 | HGMMA |\n")
    for arch in TARGETS:
        launches = dict(launches_of(arch))
        assert len(launches) == len(list(launches_of(arch))) > 50
    launch = next(iter(launches.values()))
    other = dataclasses.replace(launch, options={**launch.options, "num_warps": 1})
    assert launch.digest == dict(launches_of(arch))["D 128 bfloat16 plain 0"].digest
    assert launch.digest != other.digest, "a result for other tiles is none for these"
