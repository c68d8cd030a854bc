"""Large outputs on a CPU are written to the memory of the last ones, which nobody uses any more."""

import resource

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_packed import Int8Linear, PackedLinear
from cbatch_kernels.kept_memory import KeptMemory

from tests.cpu_variants import each_variant

ROWS, COLUMNS = 33, 2**18
"""33 MiB, which glibc's malloc always maps anew."""


def test_memory_is_handed_out_again_once_nothing_holds_it() -> None:
    memory = KeptMemory()
    first = memory.empty(ROWS, COLUMNS)
    place, view = first.data_ptr(), first[3:5]
    del first
    second = memory.empty(ROWS, COLUMNS)
    assert second.data_ptr() != place, "a view of the first was still alive"
    del view
    place = second.data_ptr()
    del second
    assert memory.empty(ROWS, COLUMNS).data_ptr() == place
    third = memory.empty(ROWS - 5, COLUMNS)
    assert third.data_ptr() == place and third.shape == (ROWS - 5, COLUMNS)
    assert third.dtype == torch.float32 and third.is_contiguous() and place % 64 == 0
    del third
    assert memory.empty(ROWS + 1, COLUMNS).shape == (ROWS + 1, COLUMNS)


def test_small_outputs_are_not_kept() -> None:
    memory = KeptMemory()
    assert memory.empty(4, 8).untyped_storage().nbytes() == 4 * 8 * 4
    assert memory.empty(0, 8).shape == (0, 8)


@each_variant
@pytest.mark.parametrize("linear_type", [PackedLinear, Int8Linear])
def test_products_with_a_vocabulary_fault_no_pages_and_share_no_memory(
    kernels: CPUKernels, linear_type: type[PackedLinear | Int8Linear]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (COLUMNS, 2), generator=generator).float()
    weight[:, 0] = 127.0  # so that 8 bits hold every weight as it is
    rows = torch.randint(-9, 10, (2, ROWS, 2), generator=generator).float()
    linear = linear_type(weight, None, kernels)
    kept = linear(rows[0])
    linear(rows[1])  # whose memory is free again
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    last = linear(rows[1])
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - num_faults
    assert num_faults < last.nbytes / resource.getpagesize() / 10
    for actual, given in ((kept, rows[0]), (last, rows[1])):
        expected = given.double() @ weight.double().t()
        torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=0.1)
