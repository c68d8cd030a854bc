"""The largest logit without all of them: always the one of the whole float32 product."""

import math

import pytest
import torch
from cbatch_kernels.cpu_head import VocabularyHead
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import Int8Linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_of(weight: Tensor, kernels: CPUKernels) -> VocabularyHead:
    return VocabularyHead(weight, mode="deterministic", kernels=kernels)


def check(head: VocabularyHead, rows: Tensor) -> Tensor:
    """The largest logits of `rows`, compared with all; returns which were computed."""
    expected, actual = head.all_logits(rows), head.largest_logits(rows)
    kept = actual > -math.inf
    assert torch.equal(actual[kept], expected[kept])
    assert torch.equal(actual.argmax(dim=-1), expected.argmax(dim=-1))
    assert torch.equal(actual.amax(dim=-1), expected.amax(dim=-1))
    return kept


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
    kept = check(head_of(weight, kernels), rows)
    assert (kept.sum(dim=-1) >= 12).all() and kept.float().mean() < 0.2


@each_variant
def test_the_rounding_of_activations_counts(kernels: CPUKernels) -> None:
    """Weights of 8 bits exactly; a row whose roundings all go the same way against one column."""
    row, weight = torch.full((1, 32), 0.49), torch.zeros(70, 32)
    row[0, :2] = torch.tensor([32767.0, 10.0])  # one unit of activation is 1.0
    weight[:, 0] = 127.0
    weight[20, 2:], weight[50, 1] = 126.0, 126.0
    head = head_of(weight, kernels)
    assert head.all_logits(row).argmax() == 20
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
    assert best != Int8Linear(weight, None, kernels)(row).argmax(dim=-1)
    check(head, row)


@each_variant
def test_of_equal_logits_the_first(kernels: CPUKernels) -> None:
    weight = random(6, 50, 32).repeat(4, 1)
    kept = check(head_of(weight, kernels), random(7, 9, 32))
    assert (kept.sum(dim=-1) >= 4).all()


@each_variant
def test_few_columns_are_computed_twice(kernels: CPUKernels) -> None:
    weight = random(8, 5000, 256)
    kept = check(head_of(weight, kernels), 3.0 * weight[:20] + random(9, 20, 256))
    assert kept.float().mean() < 0.001


@each_variant
def test_a_row_is_the_same_alone(kernels: CPUKernels) -> None:
    weight, rows = random(10, 700, 64), random(11, 30, 64)
    head = head_of(weight, kernels)
    together = head.largest_logits(rows)
    alone = torch.cat([head.largest_logits(row[None]) for row in rows])
    assert torch.equal(together, alone)
    assert torch.equal(head.largest_logits(rows.t().contiguous().t()), together)


@each_variant
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(kernels: CPUKernels, value: float) -> None:
    weight, rows = random(12, 200, 32), random(13, 3, 32)
    rows[1, 5] = value
    actual = head_of(weight, kernels).largest_logits(rows)
    assert not actual[1].max().isfinite()
    assert torch.equal(actual.amax(dim=-1).isfinite(), torch.tensor([True, False, True]))


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
    assert head.num_rows < 100 and head.num_kept == 300 * head.num_rows
    peaked = head_of(random(17, 300, 64), kernels)
    for seed in range(10):
        check(peaked, 5 * peaked._weight[seed : seed + 20])
    assert peaked.num_rows == 200
