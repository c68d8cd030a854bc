"""Statistics of logits against torch, ties and broken rows included."""

import math

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_sampling import exponential_sums, row_maxima, top_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant


@st.composite
def logits(draw: st.DrawFn) -> Tensor:
    """Rows with many ties, masked tokens, or none of them."""
    num_rows = draw(st.integers(1, 5))
    vocab_size = draw(st.sampled_from([1, 5, 64, 255, 256, 257, 1000, 20000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = torch.randn(num_rows, vocab_size + 3, generator=generator) * 5
    if draw(st.booleans()):
        rows = rows.round()
    if draw(st.booleans()):
        rows[torch.rand(rows.shape, generator=generator) < 0.7] = -math.inf
    return rows[:, :vocab_size]


@each_variant
@settings(max_examples=60, deadline=None)
@given(rows=logits())
def test_maxima_are_the_first_of_the_largest(kernels: CPUKernels, rows: Tensor) -> None:
    maxima = row_maxima(kernels, rows)
    assert torch.equal(maxima.best, rows.max(dim=1).values)
    assert torch.equal(maxima.best_ids, (rows == maxima.best[:, None]).int().argmax(dim=1))
    for index, block in enumerate(rows.split(256, dim=1)):
        assert torch.equal(maxima.block_maxima[:, index], block.max(dim=1).values)


@each_variant
@settings(max_examples=60, deadline=None)
@given(rows=logits(), temperature=st.floats(0.1, 3.0))
def test_sums_give_the_logarithm_of_the_denominator(
    kernels: CPUKernels, rows: Tensor, temperature: float
) -> None:
    rows[:, 0] = 1.0
    maxima = row_maxima(kernels, rows)
    factors = torch.full((len(rows),), 1.0 / temperature)
    sums = exponential_sums(kernels, rows, maxima, factors)
    expected = torch.logsumexp(rows.double() / temperature, dim=1)
    torch.testing.assert_close(
        maxima.best.double() / temperature + sums.log(), expected, rtol=1e-5, atol=1e-5
    )


@each_variant
@settings(max_examples=60, deadline=None)
@given(rows=logits(), count=st.sampled_from([1, 2, 64, 300]))
def test_top_logits_are_exact(kernels: CPUKernels, rows: Tensor, count: int) -> None:
    count = min(count, rows.shape[1])
    values, ids = top_logits(kernels, rows, row_maxima(kernels, rows), count)
    expected_values, expected_ids = rows.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected_values[:, :count])
    assert torch.equal(ids, expected_ids[:, :count])


@each_variant
@pytest.mark.parametrize("place", [0, 3, 255, 256, 999])
def test_a_logit_that_is_not_a_number_marks_its_row(kernels: CPUKernels, place: int) -> None:
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    rows[1, place] = math.nan
    maxima = row_maxima(kernels, rows)
    assert maxima.best.isnan().tolist() == [False, True, False]
    values, ids = top_logits(kernels, rows, maxima, 4)
    assert values.isnan().any(dim=1).tolist() == [False, True, False]
    assert torch.equal(ids[[0, 2]], rows[[0, 2]].topk(4).indices)


@each_variant
def test_what_does_not_fit_is_refused(kernels: CPUKernels) -> None:
    rows = torch.zeros(2, 10)
    for wrong in (rows.double(), rows.t(), rows[0]):
        with pytest.raises(ValueError, match="logits are"):
            row_maxima(kernels, wrong)
    for count in (0, 11):
        with pytest.raises(ValueError, match="count is"):
            top_logits(kernels, rows, row_maxima(kernels, rows), count)
