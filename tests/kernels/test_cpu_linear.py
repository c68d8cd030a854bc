"""Linear layers against float64, and rows whose bits do not depend on their company."""

import math

import pytest
import torch
from cbatch_kernels import cpu_linear
from cbatch_kernels.cpu_library import CPUKernels, KernelsUnavailable
from cbatch_kernels.cpu_linear import Int8Linear, Linear, PackedLinear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant

SIZES = st.sampled_from([1, 2, 7, 8, 31, 32, 33, 97, 130])


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_columns=SIZES,
    depth=SIZES,
    seed=st.integers(0, 2**32),
    with_bias=st.booleans(),
)
def test_packed_product_is_exact_to_rounding(
    kernels: CPUKernels, num_rows: int, num_columns: int, depth: int, seed: int, with_bias: bool
) -> None:
    weight, rows = random(seed, num_columns, depth), random(seed + 1, num_rows, depth)
    bias = random(seed + 2, num_columns) if with_bias else None
    expected = torch.nn.functional.linear(
        rows.double(), weight.double(), None if bias is None else bias.double()
    )
    guarded = torch.full((num_rows + 1, num_columns), math.nan)
    PackedLinear(weight, bias, kernels)(rows, out=guarded[:num_rows])
    bound = 1e-6 * math.sqrt(depth) + 1e-6
    torch.testing.assert_close(guarded[:num_rows].double(), expected, rtol=1e-5, atol=bound)
    assert guarded[num_rows:].isnan().all()


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_columns=SIZES,
    depth=SIZES,
    seed=st.integers(0, 2**32),
    with_bias=st.booleans(),
)
def test_int8_product_is_that_of_the_rounded_weights(
    kernels: CPUKernels, num_rows: int, num_columns: int, depth: int, seed: int, with_bias: bool
) -> None:
    weight, rows = random(seed, num_columns, depth), random(seed + 1, num_rows, depth)
    bias = random(seed + 2, num_columns) if with_bias else None
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = (weight / scales).round().double() * scales.double()
    expected = torch.nn.functional.linear(
        rows.double(), rounded, None if bias is None else bias.double()
    )
    guarded = torch.full((num_rows + 1, num_columns), math.nan)
    Int8Linear(weight, bias, kernels)(rows, out=guarded[:num_rows])
    # Activations have at least 2^31 / (127 * 130) = 130,000 levels, hence 32,767 of them.
    bound = 3e-4 * math.sqrt(depth)
    torch.testing.assert_close(guarded[:num_rows].double(), expected, rtol=0, atol=bound)
    assert guarded[num_rows:].isnan().all()


@each_variant
@pytest.mark.parametrize("depth", [8192, 8193, 60000])
def test_the_largest_int8_sums_do_not_overflow(kernels: CPUKernels, depth: int) -> None:
    weight, rows = torch.ones(33, depth), torch.ones(3, depth)
    torch.testing.assert_close(
        Int8Linear(weight, None, kernels)(rows), torch.full((3, 33), float(depth))
    )
    torch.testing.assert_close(
        Int8Linear(-weight, None, kernels)(rows), torch.full((3, 33), -float(depth))
    )


@each_variant
def test_int8_rows_of_zeros_and_of_broken_numbers(kernels: CPUKernels) -> None:
    linear = Int8Linear(random(0, 40, 16), None, kernels)
    rows = random(1, 4, 16)
    expected = linear(rows)
    rows[0] = 0.0
    rows[1, 3] = math.nan
    rows[2, 5] = math.inf
    output = linear(rows)
    assert not output[0].any()
    assert output[1:3].isnan().all()
    assert torch.equal(output[3], expected[3])


@each_variant
@pytest.mark.parametrize("make", [PackedLinear, Int8Linear])
def test_bits_do_not_depend_on_company_or_threads(
    kernels: CPUKernels, make: type[PackedLinear | Int8Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = make(random(0, 200, 150), random(1, 200), kernels)
    rows = random(2, 70, 150)
    together = linear(rows)
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu_linear, "num_threads", lambda threads=threads: threads)
        for count in [*range(1, 28), 69]:
            assert torch.equal(linear(rows[:count]), together[:count])
            assert torch.equal(linear(rows[-count:]), together[-count:])


@each_variant
@pytest.mark.parametrize("make", [PackedLinear, Int8Linear])
def test_strided_rows(kernels: CPUKernels, make: type[PackedLinear | Int8Linear]) -> None:
    linear = make(random(0, 9, 15), None, kernels)
    rows = random(1, 6, 30)
    assert torch.equal(linear(rows[::2, 3:18]), linear(rows[::2, 3:18].contiguous()))
    assert torch.equal(linear(rows[:, ::2]), linear(rows[:, ::2].contiguous()))
    for wrong in (rows, rows[:, :15].double(), rows[0, :15]):
        with pytest.raises(ValueError, match="rows are"):
            linear(wrong)
    with pytest.raises(ValueError, match="weight is"):
        make(random(0, 9, 15).double(), None, kernels)


@each_variant
@pytest.mark.parametrize("mode", ["fast", "deterministic", "w8a16"])
def test_every_mode_computes_the_product(
    kernels: CPUKernels, mode: cpu_linear.LinearMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_SECONDS_PER_MEASUREMENT", 0.0)
    weight, bias, rows = random(0, 48, 32), random(1, 48), random(2, 5, 32)
    linear = cpu_linear.choose_linear(weight, bias, mode=mode, kernels=kernels)
    expected = torch.nn.functional.linear(rows, weight, bias)
    tolerance = 0.3 if mode == "w8a16" else 1e-4
    torch.testing.assert_close(linear(rows), expected, rtol=0, atol=tolerance)
    out = torch.empty(5, 48)
    assert linear(rows, out=out) is out
    assert torch.equal(out, linear(rows))
    assert mode == "fast" or linear.kind == {"deterministic": "packed", "w8a16": "int8"}[mode]


@each_variant
def test_the_fastest_kind_is_taken(kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"torch": 2.0, "onednn": 1.0, "packed": 3.0}
    monkeypatch.setattr(cpu_linear, "has_prepacked_linear", lambda: True)
    for slow in ("onednn", "torch", "packed"):
        cpu_linear._fastest_kind.cache_clear()
        monkeypatch.setattr(cpu_linear, "seconds_per_call", lambda linear, _: seconds[linear.kind])
        fastest = min(seconds, key=seconds.__getitem__)
        chosen: Linear = cpu_linear.choose_linear(
            random(0, 8, 8), None, mode="fast", kernels=kernels
        )
        assert chosen.kind == fastest
        seconds[slow] += 10.0
    seconds |= {"torch": 0.9, "onednn": 0.9, "packed": 1.0}
    cpu_linear._fastest_kind.cache_clear()
    close = cpu_linear.choose_linear(random(0, 8, 8), None, mode="fast", kernels=kernels)
    assert close.kind == "packed"
    cpu_linear._fastest_kind.cache_clear()


def test_without_kernels_torch_or_onednn_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_SECONDS_PER_MEASUREMENT", 0.0)
    weight = random(0, 12, 8)
    chosen = cpu_linear.choose_linear(weight, None, mode="fast", kernels=None)
    assert chosen.kind in ("torch", "onednn")
    for mode in ("deterministic", "w8a16"):
        with pytest.raises(KernelsUnavailable, match=mode):
            cpu_linear.choose_linear(weight, None, mode=mode, kernels=None)
