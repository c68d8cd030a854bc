"""Weights that are bfloat16 values: half of the bytes, and the bits of float32 panels."""

import math

import pytest
import torch
from cbatch_kernels import cpu_linear, cpu_packed
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, choose_linear
from cbatch_kernels.cpu_packed import PackedBFloat16Linear, PackedLinear, holds_bfloat16
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant, random

COLUMNS = st.sampled_from([1, 7, 8, 9, 16, 31, 32, 33, 64, 65, 97, 128, 130, 300])
DEPTHS = st.sampled_from([1, 2, 3, 31, 32, 63, 64, 65, 97, 130, 257])


def of_bits(bits: list[int]) -> Tensor:
    """float32 of these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def any_bfloat16(seed: int, *shape: int) -> Tensor:
    """float32 of any bfloat16 values below 2^30, all that are close to zero among them."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(0, 0x4E80, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) << 15
    return ((magnitudes | signs) << 16).to(torch.int32).view(torch.float32)


@each_variant
@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(0, 60),
    num_columns=COLUMNS,
    depth=DEPTHS,
    seed=st.integers(0, 2**32),
    with_bias=st.booleans(),
    is_ordinary=st.booleans(),
)
def test_the_bits_are_those_of_float32_panels(
    kernels: CPUKernels,
    num_rows: int,
    num_columns: int,
    depth: int,
    seed: int,
    with_bias: bool,
    is_ordinary: bool,
) -> None:
    if is_ordinary:
        weight = random(seed, num_columns, depth).bfloat16().float()
    else:
        weight = any_bfloat16(seed, num_columns, depth)
    rows = random(seed + 1, num_rows, depth)
    bias = random(seed + 2, num_columns) if with_bias else None
    expected = PackedLinear(weight, bias, kernels)(rows)
    guarded = torch.full((num_rows + 1, num_columns), math.nan)
    linear = PackedBFloat16Linear(weight, bias, kernels)
    linear(rows, out=guarded[:num_rows])
    assert torch.equal(guarded[:num_rows].view(torch.int32), expected.view(torch.int32))
    assert guarded[num_rows:].isnan().all()
    if is_ordinary:
        exact = torch.nn.functional.linear(
            rows.double(), weight.double(), None if bias is None else bias.double()
        )
        bound = 1e-6 * math.sqrt(depth) + 1e-6
        torch.testing.assert_close(linear(rows).double(), exact, rtol=1e-5, atol=bound)


@each_variant
@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 13, 40, 100])
@pytest.mark.parametrize("shape", [(576, 640), (600, 1000), (2049, 33)])
def test_the_bits_of_large_weights(
    kernels: CPUKernels, shape: tuple[int, int], num_rows: int
) -> None:
    """Of as many panels and tiles as are shared between threads in every way."""
    weight, rows = random(0, *shape).bfloat16().float(), random(1, num_rows, shape[1])
    expected = PackedLinear(weight, None, kernels)(rows)
    assert torch.equal(PackedBFloat16Linear(weight, None, kernels)(rows), expected)


@each_variant
def test_values_that_are_not_finite(kernels: CPUKernels) -> None:
    bits = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC10000, 0x7F810000, 0x80000000, 0x00010000]
    weight = of_bits(bits).repeat(5, 1)
    weight[4] = 1.0
    assert holds_bfloat16(weight, kernels)
    rows = torch.eye(len(bits))
    rows[0, 1:] = 0.0
    expected = PackedLinear(weight, None, kernels)(rows)
    actual = PackedBFloat16Linear(weight, None, kernels)(rows)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)
    only_infinity = PackedBFloat16Linear(of_bits(bits[:1])[:, None], None, kernels)
    assert only_infinity(torch.tensor([[2.0], [-1.0]])).tolist() == [[math.inf], [-math.inf]]


@each_variant
@pytest.mark.parametrize("bit", range(16))
def test_any_lower_bit_of_any_value_is_seen(
    kernels: CPUKernels, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of finite values and of others, first, last and around the parts that threads look at."""
    weight = any_bfloat16(bit, 131, 101)
    size = weight.numel()
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu_packed, "num_threads", lambda threads=threads: threads)
        assert holds_bfloat16(weight, kernels)
        for place in (0, 1, 100, 4095, 4096, 8191, 8192, size - 101, size - 2, size - 1):
            for value in (None, math.inf, math.nan):
                other = weight.clone()
                if value is not None:
                    other.view(-1)[place] = value
                    assert holds_bfloat16(other, kernels)
                other.view(torch.int32).view(-1)[place] |= 1 << bit
                assert not holds_bfloat16(other, kernels)
                with pytest.raises(ValueError, match="none of bfloat16's"):
                    PackedBFloat16Linear(other, None, kernels)


@each_variant
def test_a_weight_takes_two_bytes_a_value(kernels: CPUKernels) -> None:
    weight = random(0, 64, 40).bfloat16().float()
    assert PackedLinear(weight, None, kernels).packed.nbytes == 64 * 40 * 4
    assert PackedBFloat16Linear(weight, None, kernels).packed.nbytes == 64 * 40 * 2
    with pytest.raises(ValueError, match="weight is"):
        PackedBFloat16Linear(weight.bfloat16(), None, kernels)


@each_variant
@pytest.mark.parametrize("place", [(0, 0), (47, 31), (20, 31), (47, 0)])
def test_one_odd_value_keeps_a_weight_in_float32(
    kernels: CPUKernels, place: tuple[int, int]
) -> None:
    weight, rows = random(0, 48, 32).bfloat16().float(), random(2, 5, 32)
    exact = choose_linear(weight, None, mode="deterministic", kernels=kernels)
    assert exact.kind == "packed_bfloat16"
    assert choose_linear(weight.t(), None, mode="deterministic", kernels=kernels).kind == exact.kind
    odd = weight.clone()
    odd[place] = torch.nextafter(odd[place], torch.tensor(math.inf))
    linear = choose_linear(odd, None, mode="deterministic", kernels=kernels)
    assert linear.kind == "packed"
    assert torch.equal(linear(rows), PackedLinear(odd, None, kernels)(rows))


@each_variant
@pytest.mark.parametrize(("mode", "kind"), [("w8a16", "int8"), ("w8a8", "int8_groups")])
def test_a_mode_that_rounds_weights_rounds_these_too(
    kernels: CPUKernels, mode: LinearMode, kind: str
) -> None:
    weight = random(0, 48, 32).bfloat16().float()
    assert choose_linear(weight, None, mode=mode, kernels=kernels).kind == kind


@each_variant
def test_the_form_that_is_measured_is_the_one_that_is_used(
    kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speed beside torch's product decides, which has to be clearly faster."""
    measured: list[str] = []
    slow = ""

    def seconds_per_call(linear: cpu_packed.Linear, rows: Tensor) -> float:
        measured.append(linear.kind)
        return {"torch": 0.9, slow: 4.0}.get(linear.kind, 1.0)

    monkeypatch.setattr(cpu_linear, "seconds_per_call", seconds_per_call)
    monkeypatch.setattr(cpu_linear, "has_prepacked_linear", lambda: False)
    cpu_linear._fastest_kind.cache_clear()
    odd, exact = random(0, 48, 32), random(0, 48, 32).bfloat16().float()
    for slow in ("packed", "packed_bfloat16"):
        for weight, kind in ((odd, "packed"), (exact, "packed_bfloat16")):
            measured.clear()
            chosen = choose_linear(weight, None, mode="fast", kernels=kernels)
            assert chosen.kind == ("torch" if slow == kind else kind)
            assert set(measured) == {"torch", kind}
        cpu_linear._fastest_kind.cache_clear()
