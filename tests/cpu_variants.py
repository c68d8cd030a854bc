"""The compiled CPU kernels that tests run: every variant that this processor knows."""

from __future__ import annotations

import pytest
from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels, supported_variants


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
