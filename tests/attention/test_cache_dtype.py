"""What keys and values may be kept in, and what rounding them does to attention."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch
from cbatch_kernels import reference

from cbatch_cli.attention.backend import AttentionBackendName
from cbatch_cli.attention.cache_dtype import KVCacheDtypeName, choose_cache_dtype, scales_for
from cbatch_cli.attention.metadata import KVScales
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.errors import UsageError
from tests.attention.paged_cases import PagedCase, make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NARROW = [torch.bfloat16, torch.float16, E4M3, E5M2]
SCALES = KVScales(k=0.25, v=4.0)


def choose(
    name: KVCacheDtypeName,
    backend: AttentionBackendName,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
) -> torch.dtype:
    return choose_cache_dtype(name, backend, dtype=dtype, device=device)


def test_what_each_backend_keeps() -> None:
    for backend in ("torch", "cpu", "triton"):
        assert choose("auto", backend) == torch.bfloat16
    assert choose("bfloat16", "cpu", torch.float32) == torch.bfloat16
    assert choose("float16", "torch", torch.float32) == torch.float16
    assert choose("fp8_e5m2", "torch") == E5M2
    with pytest.raises(UsageError, match="^--kv-cache-dtype fp8_e4m3 is not what the compiled CPU"):
        choose("fp8_e4m3", "cpu")
    with pytest.raises(UsageError, match="^--kv-cache-dtype float16 is not what the compiled CPU"):
        choose("float16", "cpu")
    with pytest.raises(UsageError, match="does not go with a float32 model and Triton's"):
        choose("bfloat16", "triton", torch.float32)


@pytest.mark.parametrize(
    ("capability", "has_e4m3"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_e4m3_comes_with_ada(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_e4m3: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose("fp8_e5m2", "triton", device=CUDA) == E5M2
    if has_e4m3:
        assert choose("fp8_e4m3", "triton", device=CUDA) == E4M3
    else:
        with pytest.raises(UsageError, match=r"^--kv-cache-dtype fp8_e4m3 is not what sm_8\d has"):
            choose("fp8_e4m3", "triton", device=CUDA)


def test_e4m3_of_amd_is_a_format_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    card = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert choose("fp8_e4m3", "triton", device=CUDA) == torch.float8_e4m3fnuz
    with pytest.raises(UsageError, match="^--kv-cache-dtype fp8_e5m2 is not what gfx942 has"):
        choose("fp8_e5m2", "triton", device=CUDA)
    number = torch.tensor(3.25)
    bits = (number / 0.5).to(E4M3).view(torch.uint8)
    (scale,) = scales_for(torch.float8_e4m3fnuz, {0: KVScales(k=0.5, v=0.5)}).values()
    assert bits.view(torch.float8_e4m3fnuz).float() * scale.k == number
    assert scales_for(E4M3, {0: SCALES}) == {0: SCALES}


def with_cache(case: PagedCase, dtype: torch.dtype, scales: KVScales) -> PagedCase:
    """The case with what is in its caches rounded."""
    k, v = (scales.k, scales.v) if dtype.itemsize == 1 else (1.0, 1.0)
    return dataclasses.replace(
        case, k_cache=(case.k_cache / k).to(dtype), v_cache=(case.v_cache / v).to(dtype)
    )


def run(case: PagedCase, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.run_backend(
        lambda layers, caches, size: TorchAttentionBackend(
            layers, caches, size, kv_scales={0: scales}
        )
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_the_torch_backend_attends_over_what_it_has_rounded(dtype: torch.dtype) -> None:
    scales = SCALES if dtype.itemsize == 1 else KVScales()
    case = make_case(
        [(40, 1), (17, 9), (0, 30)], window=20, with_sinks=True, stored_already=1, softcap=4.0
    )
    case = with_cache(case, dtype, scales)
    output, k_cache, v_cache = run(case, scales)
    expected = (case.k_cache.clone(), case.v_cache.clone())
    slots = case.metadata.slot_mapping
    numbers = (case.key.to(dtype), case.value.to(dtype)) if dtype.itemsize > 1 else None
    key, value = numbers or (case.key, case.value)
    reference.store_kv(key, value, *expected, slots, k_scale=scales.k, v_scale=scales.v)
    for actual, wanted in zip((k_cache, v_cache), expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
    wanted = reference.paged_attention(
        case.query,
        k_cache,
        v_cache,
        case.metadata.block_tables,
        case.metadata.query_start_loc,
        case.metadata.seq_lens,
        scale=case.scale,
        sliding_window=case.layer.sliding_window,
        softcap=case.softcap,
        sinks=case.sinks,
        k_scale=scales.k,
        v_scale=scales.v,
    )
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", NARROW[1:])
def test_what_does_not_fit_saturates_and_nan_stays(dtype: torch.dtype) -> None:
    case = make_case([(0, 1)], num_kv_heads=1, head_dim=4, dtype=torch.float32)
    key = torch.tensor([1e30, -1e30, math.nan, 0.3]).view(1, 1, 4)
    case = with_cache(dataclasses.replace(case, key=key), dtype, KVScales())
    _, k_cache, _ = run(case, KVScales())
    slot = int(case.metadata.slot_mapping[0])
    stored = k_cache.float().view(-1, 4)[slot]
    highest = torch.finfo(dtype).max
    assert stored[:2].tolist() == [highest, -highest]
    assert stored[2].isnan() and abs(float(stored[3]) - 0.3) < 0.02
