"""Linear layers on a CPU: our products beside those of libraries, the fastest by measurement.

Every layer maps float32 `[T, K]` to float32 `[T, N]` with a weight `[N, K]`. A library's product
may give a row other bits when other rows are beside it.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Literal

import torch
from cbatch_kernels.cpu_library import (
    CPUKernels,
    KernelsUnavailable,
    num_threads,
)
from cbatch_kernels.cpu_packed import (
    GroupedInt8Linear,
    Int8Linear,
    Linear,
    LinearKind,
    PackedBFloat16Linear,
    PackedLinear,
    holds_bfloat16,
)
from torch import Tensor

LinearMode = Literal["fast", "deterministic", "w8a16", "w8a8"]


_MEASURED_ROWS = (1, 8, 32, 64, 256)
_MEASURED_COLUMNS = 4096
"""A larger weight is measured as if it had so many: the head of a model has hundreds of MB."""
_SECONDS_PER_MEASUREMENT = 0.01
_CLEARLY_FASTER = 0.85
"""Share of our own product's time that makes another one better: times on a busy machine vary,
and ours gives the same bits in every run."""


class TorchLinear:
    """`torch.nn.functional.linear`."""

    kind: LinearKind = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_columns = weight.shape[0]

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        if out is None:
            return torch.nn.functional.linear(rows, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(rows, self._weight.t(), out=out)
        return torch.addmm(self._bias, rows, self._weight.t(), out=out)


class PrepackedLinear:
    """oneDNN's product, through torch, with the weight in oneDNN's own layout."""

    kind: LinearKind = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self.num_columns = weight.shape[0]

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product if out is None else out.copy_(product)


_ROUNDED_KINDS: dict[LinearMode, LinearKind] = {"w8a16": "int8", "w8a8": "int8_groups"}


def rounds_weights(mode: LinearMode) -> bool:
    """Whether a mode rounds weights to 8 bits."""
    return mode in _ROUNDED_KINDS


def choose_linear(
    weight: Tensor, bias: Tensor | None, *, mode: LinearMode, kernels: CPUKernels | None
) -> Linear:
    """The best linear layer for a float32 weight `[N, K]`.

    "fast" measures what this machine has; "deterministic" gives every row the same bits in any
    company and in any run, as do "w8a16" and "w8a8", which round the weight to int8. Our own
    product of a weight that is not rounded keeps it in bfloat16 where that loses nothing. Raises
    `KernelsUnavailable` if the mode needs compiled kernels and there are none.
    """
    if mode == "fast":
        num_columns, depth = weight.shape
        columns = min(num_columns, _MEASURED_COLUMNS)
        own = None if kernels is None else _exact_kind(weight, kernels)
        kind = _fastest_kind(columns, depth, own, kernels, num_threads())
        return _make(kind, weight, bias, kernels)
    if kernels is None:
        raise KernelsUnavailable(f"linear layers in mode {mode} need the compiled CPU kernels")
    rounded = _ROUNDED_KINDS.get(mode)
    return _make(rounded or _exact_kind(weight, kernels), weight, bias, kernels)


def _exact_kind(weight: Tensor, kernels: CPUKernels) -> LinearKind:
    """Our own product with the smallest panels that hold a weight as it is."""
    return "packed_bfloat16" if holds_bfloat16(weight.contiguous(), kernels) else "packed"


@functools.lru_cache(maxsize=1)
def has_prepacked_linear() -> bool:
    """Whether torch's private functions for prepacked weights exist here and compute rightly."""
    try:
        weight, rows = torch.eye(16)[:, :8].contiguous(), torch.arange(24.0).view(3, 8)
        product = PrepackedLinear(weight)(rows)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, rows @ weight.t())


def seconds_per_call(linear: Linear, rows: Tensor) -> float:
    """The shortest of several calls."""
    best = math.inf
    linear(rows)
    end = time.perf_counter() + _SECONDS_PER_MEASUREMENT
    while True:
        start = time.perf_counter()
        linear(rows)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


@functools.lru_cache(maxsize=64)
def _fastest_kind(
    num_columns: int,
    depth: int,
    own: LinearKind | None,
    kernels: CPUKernels | None,
    threads: int,
) -> LinearKind:
    """The kind with the lowest geometric mean of times at `_MEASURED_ROWS`.

    `own` is that of our own product, which is taken if it is close.
    """
    # A value of float32 and of bfloat16: every kind multiplies it.
    weight = torch.full((num_columns, depth), 0.5)
    kinds: list[LinearKind] = ["torch"]
    if has_prepacked_linear():
        kinds.append("onednn")
    if own is not None:
        kinds.append(own)
    inputs = [torch.full((count, depth), 0.5) for count in _MEASURED_ROWS]

    def cost(kind: LinearKind) -> float:
        linear = _make(kind, weight, None, kernels)
        seconds = math.prod(seconds_per_call(linear, rows) for rows in inputs) ** (1 / len(inputs))
        return seconds * (_CLEARLY_FASTER if kind == own else 1.0)

    return min(kinds, key=cost)


def _make(
    kind: LinearKind, weight: Tensor, bias: Tensor | None, kernels: CPUKernels | None
) -> Linear:
    if kind == "torch":
        return TorchLinear(weight, bias)
    if kind == "onednn":
        return PrepackedLinear(weight, bias)
    assert kernels is not None
    if kind == "packed":
        return PackedLinear(weight, bias, kernels)
    if kind == "packed_bfloat16":
        return PackedBFloat16Linear(weight, bias, kernels)
    if kind == "int8":
        return Int8Linear(weight, bias, kernels)
    return GroupedInt8Linear(weight, bias, kernels)
