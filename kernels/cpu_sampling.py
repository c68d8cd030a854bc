"""Statistics of logits on a CPU: float32 `[N, vocab]` whose rows are contiguous."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from cbatch_kernels.cpu_library import CPUKernels, num_threads
from torch import Tensor

_BLOCK = 256
"""Logits per maximum; kBlock of kernels/cpu/sampling.cpp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMaxima:
    """The largest logit of each row, and of each block of a row."""

    best: Tensor
    """float32 `[N]`; not a number if any logit of the row is not."""
    best_ids: Tensor
    """int64 `[N]`: the first of the largest."""
    block_maxima: Tensor
    """float32 `[N, ceil(vocab / 256)]`."""

    def of(self, rows: Tensor) -> RowMaxima:
        """Those of some rows."""
        return RowMaxima(
            best=self.best[rows],
            best_ids=self.best_ids[rows],
            block_maxima=self.block_maxima[rows],
        )


def row_maxima(kernels: CPUKernels, logits: Tensor) -> RowMaxima:
    """The largest logit of each row in one pass over memory."""
    _check(logits)
    num_rows, vocab_size = logits.shape
    maxima = RowMaxima(
        best=logits.new_empty(num_rows),
        best_ids=torch.empty(num_rows, dtype=torch.int64),
        block_maxima=logits.new_empty(num_rows, math.ceil(vocab_size / _BLOCK)),
    )
    kernels.row_maxima(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        maxima.block_maxima.data_ptr(),
        maxima.best.data_ptr(),
        maxima.best_ids.data_ptr(),
        num_threads(),
    )
    return maxima


def exponential_sums(
    kernels: CPUKernels, logits: Tensor, maxima: RowMaxima, factors: Tensor
) -> Tensor:
    """float64 `[N]`: the sum of exp((logit - best) * factor); `factors` are float32 `[N]`.

    With 1 over the temperature as the factor, best * factor + log(sum) is the logarithm of the
    softmax's denominator.
    """
    _check(logits)
    num_rows, vocab_size = logits.shape
    sums = torch.empty(num_rows, dtype=torch.float64)
    factors = factors.to(torch.float32).contiguous()
    kernels.exponential_sums(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        maxima.best.data_ptr(),
        factors.data_ptr(),
        sums.data_ptr(),
        num_threads(),
    )
    return sums


def top_logits(
    kernels: CPUKernels, logits: Tensor, maxima: RowMaxima, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, falling, and their ids, both `[N, count]`.

    Exact; of equal logits the lower ids come first. Rows with a logit that is not a number get
    values that are not, and ids 0.
    """
    _check(logits)
    num_rows, vocab_size = logits.shape
    if not 0 < count <= vocab_size:
        raise ValueError(f"count is {count}, not between 1 and {vocab_size}")
    values = logits.new_full((num_rows, count), math.nan)
    ids = torch.zeros(num_rows, count, dtype=torch.int64)
    kernels.top_logits(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        maxima.block_maxima.data_ptr(),
        maxima.best.data_ptr(),
        count,
        values.data_ptr(),
        ids.data_ptr(),
        num_threads(),
    )
    return values, ids


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}, not float32 rows")
