"""The largest logit without all of them: always the one of the whole float32 product."""

import math

import pytest
import torch
from cbatch_kernels.cpu_head import LargestLogits, VocabularyHead
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, choose_linear
from cbatch_kernels.cpu_packed import GroupedInt8Linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant, random

each_mode = pytest.mark.parametrize("mode", ["deterministic", "w8a16", "w8a8"])


def head_of(weight: Tensor, kernels: CPUKernels) -> VocabularyHead:
    return VocabularyHead(weight, None, mode="deterministic", kernels=kernels)


def largest(head: VocabularyHead, rows: Tensor) -> LargestLogits:
    found = head.largest_logits(rows)
    assert found is not None
    return found


def check(head: VocabularyHead, rows: Tensor) -> int:
    """The largest logits of `rows`, compared with all; returns how many were computed exactly."""
    before = head.num_exact
    expected, actual = head.all_logits(rows), head.largest_logits(rows)
    if actual is None:
        return 0
    assert torch.equal(actual.token_ids, expected.argmax(dim=-1))
    assert torch.equal(actual.values, expected.amax(dim=-1))
    return head.num_exact - before


@each_variant
@settings(max_examples=80, deadline=None)
@given(
    num_rows=st.integers(0, 20),
    num_columns=st.sampled_from([1, 3, 31, 64, 65, 127, 500, 4097]),
    depth=st.sampled_from([1, 2, 7, 32, 97, 640]),
    seed=st.integers(0, 2**32),
    tail=st.sampled_from([1.0, 3.0, 7.0]),
    scale=st.sampled_from([1e-20, 1.0, 1e12]),
)
def test_it_is_the_largest_of_all(
    kernels: CPUKernels,
    num_rows: int,
    num_columns: int,
    depth: int,
    seed: int,
    tail: float,
    scale: float,
) -> None:
    weight, rows = random(seed, num_columns, depth), random(seed + 1, num_rows, depth)
    weight = weight.sign() * weight.abs() ** tail
    check(head_of(weight, kernels), rows.sign() * rows.abs() ** tail * scale)


EXTREMES = [1e-44, 1e-38, 1e-30, 1e-22, 1e-12, 1.0, 1e12, 1e22, 1e30, 1e38]


@each_variant
@settings(max_examples=200, deadline=None)
@given(
    num_columns=st.sampled_from([1, 33, 200]),
    depth=st.sampled_from([1, 3, 64, 100, 200]),
    seed=st.integers(0, 2**32),
    of_weight=st.sampled_from(EXTREMES),
    of_rows=st.sampled_from(EXTREMES),
    is_mixed=st.booleans(),
    is_coarse=st.booleans(),
)
def test_numbers_near_the_ends_of_float32(
    kernels: CPUKernels,
    num_columns: int,
    depth: int,
    seed: int,
    of_weight: float,
    of_rows: float,
    is_mixed: bool,
    is_coarse: bool,
) -> None:
    """Products that overflow or lose their last bits; groups of unlike sizes; ties."""
    weight, rows = random(seed, num_columns, depth), random(seed + 1, 8, depth)
    if is_coarse:
        weight, rows = weight.round(), rows.round()
    if is_mixed:
        generator = torch.Generator().manual_seed(seed)
        weight = weight * 10.0 ** torch.randint(-9, 1, weight.shape, generator=generator)
        rows[:, : depth // 2] *= 1e-6
    weight, rows = weight * of_weight, (rows * of_rows).clamp(-3e38, 3e38)
    weight = weight.clamp(-3e38, 3e38)
    head = head_of(weight, kernels)
    expected, found = head.all_logits(rows), largest(head, rows)
    is_nan = expected.isnan().any(dim=-1)
    assert torch.equal(found.values.isnan(), is_nan)
    assert torch.equal(found.values[~is_nan], expected.amax(dim=-1)[~is_nan])
    assert torch.equal(found.token_ids[~is_nan], expected.argmax(dim=-1)[~is_nan])


@each_variant
def test_neighbours_that_eight_bits_cannot_tell_apart(kernels: CPUKernels) -> None:
    """Every column has copies that differ in their last bits, and the rows look at them."""
    columns = random(1, 40, 96)
    copies = [columns]
    for step in range(1, 12):
        copies.append(columns * (1 + step * 2.0**-22))
    weight = torch.stack(copies, dim=1).flatten(0, 1)
    weight = weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(2))]
    rows = columns + 0.1 * random(3, 40, 96)
    num_exact = check(head_of(weight, kernels), rows)
    assert 40 * 12 <= num_exact < 0.2 * 40 * len(weight)


@each_variant
def test_the_rounding_of_activations_counts(kernels: CPUKernels) -> None:
    """Weights of 8 bits exactly; a row whose roundings all go the same way against one column."""
    row, weight = torch.full((1, 64), 0.49), torch.zeros(70, 64)
    row[0, :2] = torch.tensor([127.0, -127.0])  # one unit of activation is 1.0
    weight[20, 2:], weight[50, 0] = 127.0, 28.0
    assert GroupedInt8Linear(weight, None, kernels)(row).argmax() == 50
    head = head_of(weight, kernels)
    assert head.all_logits(row).argmax() == 20
    check(head, row)


@each_variant
def test_the_rounding_of_weights_counts(kernels: CPUKernels) -> None:
    """A row that 8 bits hold; columns whose roundings all go the same way, each its own."""
    row, weight = torch.ones(1, 64), torch.zeros(70, 64)
    weight[:, 0], weight[20, 1:], weight[50, 1:41] = 127.0, 0.49, 0.51
    rounded = GroupedInt8Linear(weight, None, kernels)(row)[0]
    assert rounded[[20, 50]].tolist() == [127.0, 167.0]
    head = head_of(weight, kernels)
    assert head.all_logits(row).argmax() == 20
    check(head, row)


@each_variant
def test_the_roundings_of_the_float32_product_count(kernels: CPUKernels) -> None:
    """Nothing but a long sum is rounded, up at nearly every step, from 0.51 to 1."""
    row, weight = torch.full((1, 640), 0.5), torch.zeros(70, 640)
    row[:, :64] = 512.0
    weight[[20, 50], :64] = 508.0  # products of 64 * 508 * 512, just below 2^24
    weight[20, 64:] = 1.02
    weight[50, 0] += 440 / 512
    head = head_of(weight, kernels)
    logits = head.all_logits(row)[0]
    assert logits.argmax() == 20 and logits[50] > row[0].double() @ weight[20].double() + 100
    check(head, row)


@each_variant
@pytest.mark.parametrize(("of_weight", "of_row"), [(-75, -75), (-110, -40), (-40, -110)])
def test_what_is_lost_below_the_smallest_number_counts(
    kernels: CPUKernels, of_weight: int, of_row: int
) -> None:
    """Products of 0.75 of it, which become 1 as they are added."""
    row, weight = torch.full((1, 64), 1.5 * 2.0**of_row), torch.zeros(70, 64)
    weight[20], weight[50, 0] = 2.0**of_weight, 72 * 2.0**of_weight
    head = head_of(weight, kernels)
    assert (head.all_logits(row)[0, [20, 50]].double() * 2.0**149).tolist() == [64, 54]
    check(head, row)


@each_variant
def test_columns_that_only_the_order_of_additions_tells_apart(kernels: CPUKernels) -> None:
    """Permutations of one column under a row of equal values."""
    generator = torch.Generator().manual_seed(4)
    column = torch.randint(1, 128, (640,), generator=generator).float()
    column[0] = 127.0
    weight = torch.stack(
        [
            column[torch.randperm(640, generator=generator)] * (1 + step * 2.0**-23)
            for step in range(6)
            for _ in range(50)
        ]
    )
    head = head_of(weight, kernels)
    row = torch.full((1, 640), 0.1)
    best = head.all_logits(row).argmax(dim=-1)
    assert best != GroupedInt8Linear(weight, None, kernels)(row).argmax(dim=-1)
    check(head, row)


@each_variant
def test_of_equal_logits_the_first(kernels: CPUKernels) -> None:
    weight = random(6, 50, 32).repeat(4, 1)
    assert check(head_of(weight, kernels), random(7, 9, 32)) >= 9 * 4


@each_variant
def test_what_threads_computed_is_counted_together(kernels: CPUKernels) -> None:
    weight = random(20, 1, 16).repeat(20_000, 1)
    assert check(head_of(weight, kernels), random(21, 3, 16)) == 3 * len(weight)


@each_variant
def test_what_the_likely_one_surpasses_is_not_computed(kernels: CPUKernels) -> None:
    """Logits whose bounds reach each other, but not the other logit itself."""
    row, columns = torch.ones(1, 64), torch.full((500, 64), 2.0)
    columns[:, 1:48] = 1.0
    columns[300, 1:48] = 2.0
    columns[:, 1::2] += 0.49
    columns[:, 2::2] -= 0.49
    columns[:, 0] = 127.0  # one unit of weight is 1.0
    head = head_of(columns, kernels)
    linear = GroupedInt8Linear(columns, None, kernels)
    logits, reach = linear(row)[0], 8.0 * linear.errors.min()
    others = logits[torch.arange(500) != 300]
    assert (logits[300] - 2 * reach < others).all() and (logits[300] - reach > others).all()
    assert 1 <= check(head, row) <= kernels.panel


@each_variant
def test_few_columns_are_computed_twice(kernels: CPUKernels) -> None:
    weight = random(8, 5000, 256)
    num_exact = check(head_of(weight, kernels), 3.0 * weight[:20] + random(9, 20, 256))
    assert 20 <= num_exact < 0.001 * 20 * len(weight)


@each_variant
@each_mode
def test_a_row_is_the_same_alone(kernels: CPUKernels, mode: LinearMode) -> None:
    weight, rows = random(10, 700, 64), random(11, 30, 64)
    head = VocabularyHead(weight, None, mode=mode, kernels=kernels)
    together = largest(head, rows)
    alone = [largest(head, row[None]) for row in rows]
    assert torch.equal(together.values, torch.cat([found.values for found in alone]))
    assert torch.equal(together.token_ids, torch.cat([found.token_ids for found in alone]))
    other_strides = largest(head, rows.t().contiguous().t())
    assert torch.equal(other_strides.values, together.values)


@each_variant
@each_mode
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(kernels: CPUKernels, mode: LinearMode, value: float) -> None:
    weight, rows = random(12, 200, 32), random(13, 3, 32)
    rows[1, 5] = value
    found = largest(VocabularyHead(weight, None, mode=mode, kernels=kernels), rows)
    assert found.values.isnan().tolist() == [False, True, False]
    weight[150, 3], rows[0, 3], rows[2, 3] = value, 1.0, -1.0
    head = VocabularyHead(weight, None, mode=mode, kernels=kernels)
    expected = head.all_logits(rows[::2]).amax(dim=-1).isfinite()
    assert torch.equal(largest(head, rows[::2]).values.isfinite(), expected)
    assert not expected.all()


@each_variant
@settings(max_examples=80, deadline=None)
@given(
    mode=st.sampled_from(["w8a16", "w8a8"]),
    num_rows=st.integers(0, 30),
    num_columns=st.sampled_from([1, 31, 64, 65, 500, 4097]),
    depth=st.sampled_from([1, 7, 32, 97, 130]),
    seed=st.integers(0, 2**32),
    has_bias=st.booleans(),
)
def test_with_weights_of_eight_bits_it_is_the_largest_of_the_rounded(
    kernels: CPUKernels,
    mode: LinearMode,
    num_rows: int,
    num_columns: int,
    depth: int,
    seed: int,
    has_bias: bool,
) -> None:
    # Few different weights: many logits are equal.
    weight = random(seed, num_columns, depth).sign()
    rows = random(seed + 1, num_rows, depth).round()
    bias = random(seed + 2, num_columns).round() if has_bias else None
    head = VocabularyHead(weight, bias, mode=mode, kernels=kernels)
    linear = choose_linear(weight, bias, mode=mode, kernels=kernels)
    assert torch.equal(head.all_logits(rows), linear(rows))
    check(head, rows)
    assert head.num_exact == 0


@each_variant
def test_negative_logits_lose_to_no_column_that_is_not_there(kernels: CPUKernels) -> None:
    weight = random(18, 33, 16).abs()
    check(head_of(weight, kernels), -random(19, 4, 16).abs())
    for mode in ("w8a16", "w8a8"):
        head = VocabularyHead(weight, None, mode=mode, kernels=kernels)
        check(head, -random(19, 4, 16).abs())


@each_variant
def test_rows_and_columns_of_zeros(kernels: CPUKernels) -> None:
    weight, rows = random(14, 130, 32), random(15, 3, 32)
    weight[7], rows[1] = 0.0, 0.0
    check(head_of(weight, kernels), rows)
    check(head_of(torch.zeros(130, 32), kernels), rows)


@each_variant
def test_it_gives_up_where_most_columns_could_be_the_largest(kernels: CPUKernels) -> None:
    head = head_of(random(16, 1, 32).repeat(300, 1), kernels)
    for seed in range(10):
        check(head, random(seed, 20, 32))
    assert head.num_rows < 100 and head.num_exact == 300 * head.num_rows
    assert head.largest_logits(random(0, 20, 32)) is None
    peaked = head_of(random(17, 300, 64), kernels)
    for seed in range(10):
        check(peaked, 5 * random(17, 300, 64)[seed : seed + 20])
    assert peaked.num_rows == 200
