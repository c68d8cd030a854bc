"""Weights packed for our own products on a CPU, as they are or rounded to 8 bits.

Every class here maps float32 `[T, K]` to float32 `[T, N]` with a weight `[N, K]`, and gives each
row the same bits in any company.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from cbatch_kernels.cpu_library import (
    CPUKernels,
    LinearArguments,
    WeightFormat,
    address,
    num_threads,
)
from cbatch_kernels.kept_memory import KeptMemory
from torch import Tensor

LinearKind = Literal["torch", "onednn", "packed", "packed_bfloat16", "int8", "int8_groups"]

_GROUP = 128
"""Depths that share a scale of an int8 weight, unless it has values of its own: at most 512, and
even."""
_BLOCK = 32
"""The blocks of weights that come as 8 bits with a scale."""
_COLUMNS_TO_JUDGE = 64
"""Columns rounded by blocks to see whether that changes nothing."""


class Linear(Protocol):
    """A linear layer over float32 rows."""

    kind: LinearKind
    num_columns: int

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """`[T, K]` to `[T, N]`; into `out` if given, which is contiguous."""
        ...


class _OwnLinear:
    """A weight packed for one of our kernels: `[T, K]` to `[T, N]`.

    A subclass packs it and sets `_weight_arguments`, those of its kernel from the packed weight on
    to the output.
    """

    _format: WeightFormat
    packed: Tensor
    scales: Tensor | None = None
    """What is not in `packed` itself."""
    group: int = 0
    """Depths that share a scale."""
    _weight_arguments: tuple[Any, ...]

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: CPUKernels,
        multiply: Callable[..., None],
    ) -> None:
        _check_weight(weight)
        self.num_columns, self.depth = weight.shape
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._padded = math.ceil(self.num_columns / kernels.panel) * kernels.panel
        self._multiply, self._outputs = multiply, KeptMemory()

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
            *self._weight_arguments,
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
            format=self._format,
        )


class _PanelLinear(_OwnLinear):
    """A weight in panels that hold all that its product needs."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: CPUKernels,
        *,
        pack: Callable[..., None],
        multiply: Callable[..., None],
        bytes_per_column: int,
        notes: tuple[Tensor, ...] = (),
    ) -> None:
        """`notes` are what `pack` writes beside the packed weight."""
        super().__init__(weight, bias, kernels, multiply)
        weight = weight.contiguous()
        self.packed = torch.empty(self._padded * bytes_per_column, dtype=torch.uint8)
        pack(
            address(weight),
            self.num_columns,
            self.depth,
            address(self.packed),
            *(address(of_columns) for of_columns in notes),
            num_threads(),
        )
        self._weight_arguments = (address(self.packed), address(self._bias), self.num_columns)


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


class PackedBFloat16Linear(_PanelLinear):
    """The bits of `PackedLinear` from half of its bytes, for weights that are bfloat16 values.

    Raises `ValueError` for others: `holds_bfloat16` tells them.
    """

    kind: LinearKind = "packed_bfloat16"
    _format = WeightFormat.BFLOAT16

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CPUKernels) -> None:
        def pack(weight: int, num_columns: int, depth: int, packed: int, threads: int) -> None:
            lost = torch.empty(1, dtype=torch.int64)
            kernels.pack_linear_bfloat16(weight, num_columns, depth, packed, address(lost), threads)
            if lost.item():
                raise ValueError("weight holds values that are none of bfloat16's")

        super().__init__(
            weight,
            bias,
            kernels,
            pack=pack,
            multiply=kernels.linear_bfloat16,
            bytes_per_column=2 * weight.shape[-1],
        )


def holds_bfloat16(weight: Tensor, kernels: CPUKernels) -> bool:
    """Whether all values of a contiguous float32 tensor, finite or not, are bfloat16 values."""
    found = torch.empty(1, dtype=torch.int64)
    kernels.bits_beyond_bfloat16(address(weight), weight.numel(), address(found), num_threads())
    return not found.item()


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
        self.errors, self.norms = torch.empty(2, len(weight))
        """`[N]` float32: the norms of what rounding changed in each column, and of each column."""
        super().__init__(
            weight,
            bias,
            kernels,
            pack=kernels.pack_int8_groups,
            multiply=kernels.linear_int8_groups,
            bytes_per_column=4 * math.ceil(depth / 4) + 8 * math.ceil(depth / self.group),
            notes=(self.errors, self.norms),
        )


class Int8Linear(_OwnLinear):
    """int8 weights with a scale per output and group of the depth, int16 activations with a scale
    per row: w8a16.

    A weight that was made of 8-bit blocks of 32, as in GGUF's Q8_0, keeps their values.
    """

    kind: LinearKind = "int8"
    _format = WeightFormat.INT8
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: CPUKernels) -> None:
        super().__init__(weight, bias, kernels, kernels.linear_int8)
        weight = weight.contiguous()
        self._kernels = kernels
        self.group = _BLOCK
        rounded = self._round(weight[:_COLUMNS_TO_JUDGE])
        if len(rounded) < self.num_columns and not self.errors.any():
            rounded = self._round(weight)
        if self.errors.any():
            self.group = _GROUP
            rounded = self._round(weight)
        self.packed = torch.empty(self._padded * 2 * math.ceil(self.depth / 2), dtype=torch.int8)
        kernels.pack_int8(
            address(rounded), self.num_columns, self.depth, address(self.packed), num_threads()
        )
        self._weight_arguments = (
            address(self.packed),
            address(self.scales),
            address(self._bias),
            self.num_columns,
            self.group,
        )

    def _round(self, weight: Tensor) -> Tensor:
        """int8 of a weight's shape."""
        rounded = torch.empty(weight.shape, dtype=torch.int8)
        # Those of the columns that fill the last panel stay 0.
        self.scales = torch.zeros(math.ceil(self.depth / self.group), self._padded)
        self.errors = torch.empty(len(weight))
        """`[N]` float32: the norms of what rounding changed in each column."""
        self._kernels.round_int8(
            address(weight),
            len(weight),
            self.depth,
            self.group,
            address(rounded),
            address(self.scales),
            self._padded,
            address(self.errors),
            num_threads(),
        )
        return rounded


OwnLinear = PackedLinear | PackedBFloat16Linear | Int8Linear | GroupedInt8Linear
"""The layers that our kernels compute."""


def _check_weight(weight: Tensor) -> None:
    if weight.dtype != torch.float32 or weight.dim() != 2:
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, not float32 [N, K]")


def _as_rows(rows: Tensor, depth: int) -> Tensor:
    if rows.dtype != torch.float32 or rows.dim() != 2 or rows.shape[1] != depth:
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not float32 [T, {depth}]")
    return rows if rows.stride(1) == 1 else rows.contiguous()
