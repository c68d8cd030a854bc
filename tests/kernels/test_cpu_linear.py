"""Linear layers against float64, and rows whose bits do not depend on their company."""

import math

import pytest
import torch
from cbatch_kernels import cpu_linear, cpu_packed
from cbatch_kernels.cpu_library import CPUKernels, KernelsUnavailable
from cbatch_kernels.cpu_packed import (
    GroupedInt8Linear,
    Int8Linear,
    Linear,
    OwnLinear,
    PackedBFloat16Linear,
    PackedLinear,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant, random

SIZES = st.sampled_from([1, 2, 7, 8, 31, 32, 33, 97, 130])


each_own_linear = pytest.mark.parametrize(
    "make", [PackedLinear, PackedBFloat16Linear, Int8Linear, GroupedInt8Linear]
)


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
    groups = weight.split(128, dim=1)
    scales = torch.cat([(g.abs().amax(1, True) / 127).expand_as(g) for g in groups], dim=1)
    rounded = (weight / scales).round().double() * scales.double()
    expected = torch.nn.functional.linear(
        rows.double(), rounded, None if bias is None else bias.double()
    )
    guarded = torch.full((num_rows + 1, num_columns), math.nan)
    Int8Linear(weight, bias, kernels)(rows, out=guarded[:num_rows])
    # Activations have 32,767 levels.
    bound = 3e-4 * math.sqrt(depth)
    torch.testing.assert_close(guarded[:num_rows].double(), expected, rtol=0, atol=bound)
    assert guarded[num_rows:].isnan().all()


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 30),
    num_columns=st.sampled_from([1, 33, 64, 65, 130]),
    depth=st.sampled_from([1, 2, 31, 32, 33, 64, 129, 352]),
    seed=st.integers(0, 2**32),
)
def test_weights_of_eight_bit_blocks_keep_their_values(
    kernels: CPUKernels, num_rows: int, num_columns: int, depth: int, seed: int
) -> None:
    """GGUF's Q8_0: blocks of 32 integers with a float16 scale, one of them 127 or -127."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-127, 128, (num_columns, depth), generator=generator).float()
    for block in integers.split(32, dim=1):
        block[:, torch.randint(block.shape[1], (1,), generator=generator)] = 127.0
        block[::2] *= -1.0
    scales = torch.rand(num_columns, -(-depth // 32), generator=generator).half().float()
    weight = integers * scales.repeat_interleave(32, dim=1)[:, :depth]
    # Integers with the largest that there is are rounded to themselves.
    rows = torch.randint(-32767, 32768, (num_rows, depth), generator=generator).float()
    rows[:, -1] = 32767.0
    linear = Int8Linear(weight, None, kernels)
    assert not linear.errors.any()
    expected = rows.double() @ weight.double().t()
    largest = rows.abs().double() @ weight.abs().double().t()
    assert ((linear(rows).double() - expected).abs() <= 1e-6 * largest + 1e-30).all()


@each_variant
def test_one_column_of_other_values_is_enough_to_round_by_larger_groups(
    kernels: CPUKernels,
) -> None:
    weight = torch.full((200, 64), 63.5)
    assert Int8Linear(weight, None, kernels).group == 32
    for column in (3, 150):
        other = weight.clone()
        other[column, 5] = 0.3
        linear = Int8Linear(other, None, kernels)
        assert linear.group == 128 and linear.errors.nonzero().tolist() == [[column]]


@each_variant
@pytest.mark.parametrize("kind", [Int8Linear, GroupedInt8Linear])
def test_weights_whose_scale_has_few_bits_keep_their_signs(
    kernels: CPUKernels, kind: type[Int8Linear | GroupedInt8Linear]
) -> None:
    """The scale of the smallest numbers that there are is rounded, and they are far above it."""
    weight = torch.full((3, 32), 190 * 2.0**-149)
    weight[1] *= -1.0
    rows = torch.zeros(2, 32)
    rows[:, 5] = 2.0**100
    logits, expected = kind(weight, None, kernels)(rows), 190 * 2.0**-49
    for column, sign in enumerate([1.0, -1.0, 1.0]):
        assert ((sign * logits[:, column] / expected - 1.0).abs() < 0.5).all()


DEPTHS = st.sampled_from([1, 3, 4, 8, 31, 63, 64, 65, 68, 127, 128, 129, 192, 250])


def on_grid(seed: int, num_rows: int, depth: int, *, with_offset: bool) -> Tensor:
    """Values that rounding to 8 bits by groups leaves as they are.

    In each group they are integers from -127 to 127, both ends among them, times a power of
    two, and plus a common offset if asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (num_rows, depth), generator=generator).float()
    for group in values.split(GroupedInt8Linear.group, dim=1):
        ends = torch.randperm(group.shape[1], generator=generator)[:2]
        group[:, ends] = torch.tensor([127.0, -127.0])[: len(ends)]
        group *= torch.exp2(torch.randint(-9, 1, (num_rows, 1), generator=generator))
        if with_offset:
            group += torch.randint(-64, 65, (num_rows, 1), generator=generator)
    return values


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_columns=SIZES,
    depth=DEPTHS,
    seed=st.integers(0, 2**32),
    with_bias=st.booleans(),
)
def test_grouped_int8_product_of_what_8_bits_hold_is_exact_to_rounding(
    kernels: CPUKernels, num_rows: int, num_columns: int, depth: int, seed: int, with_bias: bool
) -> None:
    weight = on_grid(seed, num_columns, depth, with_offset=False)
    rows = on_grid(seed + 1, num_rows, depth, with_offset=True)
    bias = random(seed + 2, num_columns) if with_bias else None
    expected = torch.nn.functional.linear(
        rows.double(), weight.double(), None if bias is None else bias.double()
    )
    guarded = torch.full((num_rows + 1, num_columns), math.nan)
    GroupedInt8Linear(weight, bias, kernels)(rows, out=guarded[:num_rows])
    sizes = rows.double().abs() @ weight.double().abs().t()
    assert ((guarded[:num_rows] - expected).abs() <= 1e-6 * sizes + 1e-6).all()
    assert guarded[num_rows:].isnan().all()


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    num_columns=SIZES,
    depth=DEPTHS,
    seed=st.integers(0, 2**32),
    offset=st.sampled_from([0.0, -3.0, 1e7, 1e9]),
)
def test_grouped_int8_product_is_off_by_its_roundings(
    kernels: CPUKernels, num_rows: int, num_columns: int, depth: int, seed: int, offset: float
) -> None:
    weight, rows = random(seed, num_columns, depth), random(seed + 1, num_rows, depth) + offset
    expected = rows.double() @ weight.double().t()
    size = GroupedInt8Linear.group
    bound = 1e-6 * (rows.double().abs() @ weight.double().abs().t())
    for values, weights in zip(
        rows.double().split(size, 1), weight.double().split(size, 1), strict=True
    ):
        # Half a step each: a group's activations from end to end have 254 steps.
        step = (values.amax(dim=1) - values.amin(dim=1)) / 254
        weight_step = weights.abs().amax(dim=1) / 127
        bound += 0.501 * values.abs().sum(dim=1, keepdim=True) * weight_step
        bound += 0.501 * step[:, None] * (weights.abs().sum(dim=1) + len(weights.t()) * weight_step)
    assert ((GroupedInt8Linear(weight, None, kernels)(rows) - expected).abs() <= bound).all()


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
def test_grouped_int8_product_of_values_far_from_zero(kernels: CPUKernels) -> None:
    """Their middle is rounded, so that one end is further from it than half of their range."""
    half = on_grid(0, 40, GroupedInt8Linear.group // 2, with_offset=False)
    weight = torch.cat([half, -half], dim=1)  # sums to zero, so that what is common drops out
    generator = torch.Generator().manual_seed(1)
    differences = 2.0 * torch.randint(0, 4, (9, weight.shape[1]), generator=generator)
    product = GroupedInt8Linear(weight, None, kernels)(2.0**24 + differences)
    bound = 0.51 * 4 / 127 * weight.abs().sum(dim=1)
    assert ((product - differences @ weight.t()).abs() <= bound).all()


@each_variant
def test_the_largest_sums_of_groups_do_not_overflow(kernels: CPUKernels) -> None:
    signs = torch.ones(60000)
    signs[::2] = -1.0
    linear = GroupedInt8Linear(signs.repeat(33, 1), None, kernels)
    product = linear(torch.stack([signs, -signs]))
    torch.testing.assert_close(product, torch.tensor([[6e4], [-6e4]]).expand(2, 33))


@each_variant
@pytest.mark.parametrize("make", [Int8Linear, GroupedInt8Linear])
def test_int8_rows_of_zeros_and_of_broken_numbers(
    kernels: CPUKernels, make: type[Int8Linear | GroupedInt8Linear]
) -> None:
    linear = make(random(0, 40, 16), None, kernels)
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
@each_own_linear
def test_bits_do_not_depend_on_company_or_threads(
    kernels: CPUKernels, make: type[OwnLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = make(random(0, 200, 150).bfloat16().float(), random(1, 200), kernels)
    rows = random(2, 70, 150)
    together = linear(rows)
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu_packed, "num_threads", lambda threads=threads: threads)
        for count in [*range(1, 28), 69]:
            assert torch.equal(linear(rows[:count]), together[:count])
            assert torch.equal(linear(rows[-count:]), together[-count:])


@each_variant
@each_own_linear
def test_strided_rows(kernels: CPUKernels, make: type[OwnLinear]) -> None:
    linear = make(random(0, 9, 15).bfloat16().float(), None, kernels)
    rows = random(1, 6, 30)
    assert torch.equal(linear(rows[::2, 3:18]), linear(rows[::2, 3:18].contiguous()))
    assert torch.equal(linear(rows[:, ::2]), linear(rows[:, ::2].contiguous()))
    for wrong in (rows, rows[:, :15].double(), rows[0, :15]):
        with pytest.raises(ValueError, match="rows are"):
            linear(wrong)
    with pytest.raises(ValueError, match="weight is"):
        make(random(0, 9, 15).double(), None, kernels)


@each_variant
@pytest.mark.parametrize("mode", ["fast", "deterministic", "w8a16", "w8a8"])
def test_every_mode_computes_the_product(
    kernels: CPUKernels, mode: cpu_linear.LinearMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_SECONDS_PER_MEASUREMENT", 0.0)
    weight, bias, rows = random(0, 48, 32), random(1, 48), random(2, 5, 32)
    linear = cpu_linear.choose_linear(weight, bias, mode=mode, kernels=kernels)
    expected = torch.nn.functional.linear(rows, weight, bias)
    tolerance = 0.3 if cpu_linear.rounds_weights(mode) else 1e-4
    torch.testing.assert_close(linear(rows), expected, rtol=0, atol=tolerance)
    out = torch.empty(5, 48)
    assert linear(rows, out=out) is out
    assert torch.equal(out, linear(rows))
    kinds = {"deterministic": "packed", "w8a16": "int8", "w8a8": "int8_groups"}
    assert mode == "fast" or linear.kind == kinds[mode]


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
    for mode in ("deterministic", "w8a16", "w8a8"):
        with pytest.raises(KernelsUnavailable, match=mode):
            cpu_linear.choose_linear(weight, None, mode=mode, kernels=None)
