"""Linear layers on a CPU: weights packed once, the fastest product chosen by measurement.

Every class here maps float32 `[T, K]` to float32 `[T, N]` with a weight `[N, K]`. What they have
beyond `torch.nn.functional.linear`, in which a row's bits depend on the number of rows:
`OwnLinear` give each row the same bits in any company.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from cbatch_kernels.cpu_library import (
    CPUKernels,
    KernelsUnavailable,
    LinearArguments,
    WeightFormat,
    address,
    num_threads,
)
from cbatch_kernels.kept_memory import KeptMemory
from torch import Tensor

LinearMode = Literal["fast", "deterministic", "w8a16", "w8a8"]
LinearKind = Literal["torch", "onednn", "packed", "int8", "int8_groups"]

_GROUP = 128
"""Depths that share a scale of an int8 weight, unless it has values of its own: at most 512, and
even."""
_BLOCK = 32
"""The blocks of weights that come as 8 bits with a scale."""
_COLUMNS_TO_JUDGE = 64
"""Columns rounded by blocks to see whether that changes nothing."""

_MEASURED_ROWS = (1, 8, 32, 64, 256)
_MEASURED_COLUMNS = 4096
"""A larger weight is measured as if it had so many: the head of a model has hundreds of MB."""
_SECONDS_PER_MEASUREMENT = 0.01
_CLEARLY_FASTER = 0.85
"""Share of our own product's time that makes another one better: times on a busy machine vary,
and ours gives the same bits in every run."""


class Linear(Protocol):
    """A linear layer over float32 rows."""

    kind: LinearKind
    num_columns: int

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`; into `out` if given, which is contiguous."""
        ...


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


class _PanelLinear:
    """A weight in panels that hold all that its product needs: `[T, K]` to `[T, N]`."""

    _format: WeightFormat

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: CPUKernels,
        *,
        pack: Callable[..., None],
        multiply: Callable[..., None],
        bytes_per_column: int,
    ) -> None:
        _check_weight(weight)
        weight = weight.contiguous()
        self.num_columns, self.depth = weight.shape
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._multiply, self._outputs = multiply, KeptMemory()
        padded = math.ceil(self.num_columns / kernels.panel) * kernels.panel
        self._packed = torch.empty(padded * bytes_per_column, dtype=torch.uint8)
        pack(address(weight), self.num_columns, self.depth, address(self._packed), num_threads())

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        rows = _as_rows(rows, self.depth)
        if out is None:
            out = self._outputs.empty(rows.shape[0], self.num_columns)
        self._multiply(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            self.depth,
            self._packed.data_ptr(),
            address(self._bias),
            self.num_columns,
            out.data_ptr(),
            self.num_columns,
            num_threads(),
        )
        return out

    def arguments(self) -> LinearArguments:
        """For kernels that multiply on their way; the layer must outlive them."""
        return LinearArguments(
            packed=address(self._packed),
            bias=address(self._bias),
            num_columns=self.num_columns,
            depth=self.depth,
            format=self._format,
        )


class PackedLinear(_PanelLinear):
    """Our float32 product: each output is one chain of fused multiply-adds over the depth."""

    kind: LinearKind = "packed"
    _format = WeightFormat.FLOAT32

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CPUKernels) -> None:
        super().__init__(
            weight,
            bias,
            kernels,
            pack=kernels.pack_linear,
            multiply=kernels.linear,
            bytes_per_column=4 * weight.shape[-1],
        )


class GroupedInt8Linear(_PanelLinear):
    """int8 weights and activations, both with scales per group of the depth: w8a8.

    Kernels see to both kinds of scales, see kernels/cpu/int8_groups.h.
    """

    kind: LinearKind = "int8_groups"
    _format = WeightFormat.INT8_GROUPS
    group = 64
    """Depths that share the scales; `kGroup` of the kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CPUKernels) -> None:
        depth = weight.shape[-1]
        super().__init__(
            weight,
            bias,
            kernels,
            pack=kernels.pack_int8_groups,
            multiply=kernels.linear_int8_groups,
            bytes_per_column=4 * math.ceil(depth / 4) + 8 * math.ceil(depth / self.group),
        )


class Int8Linear:
    """int8 weights with a scale per output and group of the depth, int16 activations with a scale
    per row: w8a16.

    A weight that was made of 8-bit blocks of 32, as in GGUF's Q8_0, keeps their values.
    """

    kind: LinearKind = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CPUKernels) -> None:
        _check_weight(weight)
        weight = weight.contiguous()
        self.num_columns, self.depth = weight.shape
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._kernels, self._outputs = kernels, KeptMemory()
        self._padded = math.ceil(self.num_columns / kernels.panel) * kernels.panel
        first = weight[:_COLUMNS_TO_JUDGE]
        is_whole = len(first) == self.num_columns
        self.group = _BLOCK
        """Depths that share a scale."""
        rounded = self._round(first)
        if not (is_whole or self.errors.any()):
            rounded = self._round(weight)
        if self.errors.any() or len(rounded) < self.num_columns:
            self.group = _GROUP
            rounded = self._round(weight)
        self.packed = torch.empty(self._padded * 2 * math.ceil(self.depth / 2), dtype=torch.int8)
        kernels.pack_int8(
            address(rounded), self.num_columns, self.depth, address(self.packed), num_threads()
        )

    def _round(self, weight: Tensor) -> Tensor:
        """int8 of a weight's shape."""
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        # Those of the columns that fill the last panel stay 0.
        self.scales = torch.zeros(math.ceil(self.depth / self.group), self._padded)
        self.errors, self.norms = torch.empty(2, len(weight))
        """`[N]` float32: the norms of what rounding changed in each column, and of each column."""
        self._kernels.round_int8(
            address(weight),
            len(weight),
            self.depth,
            self.group,
            address(rounded),
            address(self.scales),
            self._padded,
            address(self.errors),
            address(self.norms),
            num_threads(),
        )
        return rounded

    @property
    def num_groups(self) -> int:
        """Scales of a column."""
        return len(self.scales)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        rows = _as_rows(rows, self.depth)
        if out is None:
            out = self._outputs.empty(rows.shape[0], self.num_columns)
        self._kernels.linear_int8(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            self.depth,
            self.packed.data_ptr(),
            self.scales.data_ptr(),
            address(self._bias),
            self.num_columns,
            self.group,
            out.data_ptr(),
            self.num_columns,
            num_threads(),
        )
        return out

    def arguments(self) -> LinearArguments:
        """For kernels that multiply on their way; the layer must outlive them."""
        return LinearArguments(
            packed=address(self.packed),
            scales=address(self.scales),
            bias=address(self._bias),
            num_columns=self.num_columns,
            depth=self.depth,
            group=self.group,
            format=WeightFormat.INT8,
        )


OwnLinear = PackedLinear | Int8Linear | GroupedInt8Linear
"""The layers that our kernels compute."""

_KIND_OF_MODE: dict[LinearMode, LinearKind] = {
    "deterministic": "packed",
    "w8a16": "int8",
    "w8a8": "int8_groups",
}


def rounds_weights(mode: LinearMode) -> bool:
    """Whether a mode rounds weights to 8 bits."""
    return mode in ("w8a16", "w8a8")


def choose_linear(
    weight: Tensor, bias: Tensor | None, *, mode: LinearMode, kernels: CPUKernels | None
) -> Linear:
    """The best linear layer for a float32 weight `[N, K]`.

    "fast" measures what this machine has; "deterministic" gives every row the same bits in any
    company and in any run, as do "w8a16" and "w8a8", which round the weight to int8. Raises
    `KernelsUnavailable` if the mode needs compiled kernels and there are none.
    """
    if mode == "fast":
        num_columns, depth = weight.shape
        columns = min(num_columns, _MEASURED_COLUMNS)
        kind = _fastest_kind(columns, depth, kernels, num_threads())
        return _make(kind, weight, bias, kernels)
    if kernels is None:
        raise KernelsUnavailable(f"linear layers in mode {mode} need the compiled CPU kernels")
    return _make(_KIND_OF_MODE[mode], weight, bias, kernels)


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
    num_columns: int, depth: int, kernels: CPUKernels | None, threads: int
) -> LinearKind:
    """The kind with the lowest geometric mean of times at `_MEASURED_ROWS`; ours if it is close."""
    weight = torch.full((num_columns, depth), 0.5)
    kinds: list[LinearKind] = ["torch"]
    if has_prepacked_linear():
        kinds.append("onednn")
    if kernels is not None:
        kinds.append("packed")
    inputs = [torch.full((count, depth), 0.5) for count in _MEASURED_ROWS]

    def cost(kind: LinearKind) -> float:
        linear = _make(kind, weight, None, kernels)
        seconds = math.prod(seconds_per_call(linear, rows) for rows in inputs) ** (1 / len(inputs))
        return seconds * (_CLEARLY_FASTER if kind == "packed" else 1.0)

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
    if kind == "int8":
        return Int8Linear(weight, bias, kernels)
    return GroupedInt8Linear(weight, bias, kernels)


def _check_weight(weight: Tensor) -> None:
    if weight.dtype != torch.float32 or weight.dim() != 2:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, not float32 [N, K]")


def _as_rows(rows: Tensor, depth: int) -> Tensor:
    if rows.dtype != torch.float32 or rows.dim() != 2 or rows.shape[1] != depth:
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not float32 [T, {depth}]")
    return rows if rows.stride(1) == 1 else rows.contiguous()
