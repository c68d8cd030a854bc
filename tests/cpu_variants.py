"""What tests of the compiled CPU kernels share: their variants, and numbers to compute with."""

from __future__ import annotations

import pytest
import torch
from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels, supported_variants
from torch import Tensor


def random(seed: int, *shape: int) -> Tensor:
    """Normally distributed float32, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def variants() -> tuple[str, ...]:
    """Names of the variants, or none where the kernels were not built."""
    try:
        return supported_variants()
    except KernelsUnavailable:
        return ()


each_variant = pytest.mark.parametrize(
    "kernels",
    [pytest.param(load_kernels(name), id=name) for name in variants()]
    or [pytest.param(None, marks=pytest.mark.skip(reason="the CPU kernels were not built"))],
)
