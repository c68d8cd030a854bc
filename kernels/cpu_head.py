"""The product with a vocabulary on a CPU, cheaper where only the largest logit is asked for.

An 8-bit product, which reads a quarter of the bytes, bounds every logit; those that can be the
largest are then computed in float32, to the bits of the float32 product. The bound is proved, so
the largest logit is the float32 product's own. With w the weight of a column, q its rounding, x
the row and y its rounding:

    |q.y - w.x| <= |w - q| |x| + |q| |y - x|        (Cauchy-Schwarz)

and |q| <= |w| + |w - q|. Roundings of float32 sums are bounded by their number of terms.
"""

from __future__ import annotations

import math

import torch
from cbatch_kernels.cpu_library import CPUKernels, address, num_threads
from cbatch_kernels.cpu_linear import Int8Linear, Linear, LinearMode, choose_linear
from torch import Tensor

_UNIT_ROUNDOFF = 2.0**-24
_FEW_ROUNDINGS = 64
"""More than the roundings of a logit beside those of its sum: scales, bounds, the norms' own."""
_ROUNDING_OF_A_ROW = 0.51
"""How far an activation lies from its integer, the multiplication's own rounding included."""
_LARGEST_SHARE = 0.05
"""Share of the columns computed twice above which the float32 product alone is faster."""
_ROWS_TO_JUDGE = 64


class VocabularyHead:
    """Logits `[T, V]` of float32 rows `[T, K]` and a weight `[V, K]` without a bias.

    What a call needs is made in the first one that needs it: all logits need the weight packed,
    the largest alone needs its 8-bit form. The weight itself must stay as it is.
    """

    def __init__(self, weight: Tensor, *, mode: LinearMode, kernels: CPUKernels) -> None:
        self._weight, self._mode, self._kernels = weight.contiguous(), mode, kernels
        self._all: Linear | None = None
        self._rounded: Int8Linear | None = None
        self.num_rows = 0
        """Rows of which only the largest logit was computed."""
        self.num_kept = 0
        """Logits of these rows that were computed in float32."""

    def all_logits(self, rows: Tensor) -> Tensor:
        """`[T, K]` to `[T, V]`."""
        if self._all is None:
            self._all = choose_linear(self._weight, None, mode=self._mode, kernels=self._kernels)
        return self._all(rows)

    def largest_logits(self, rows: Tensor) -> Tensor:
        """`[T, K]` to `[T, V]`: `all_logits`, but what cannot be a row's largest may be -inf."""
        num_columns, depth = self._weight.shape
        if not self._pays:
            return self.all_logits(rows)
        if self._rounded is None:
            self._rounded = Int8Linear(self._weight, None, self._kernels)
            # Of a column, per unit of a row's norm: |w - q|, and the roundings of both products.
            self._errors = self._rounded.errors + (
                (depth + _FEW_ROUNDINGS) * _UNIT_ROUNDOFF * 1.01 * self._rounded.norms
            )
            self._norms = (self._rounded.norms + self._rounded.errors) * 1.001
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        logits = self._rounded(rows)
        row_norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) * 1.0001
        row_errors = rows.abs().amax(dim=1).double() * (
            _ROUNDING_OF_A_ROW * math.sqrt(depth) / self._rounded.largest_activation
        )
        row_norms, row_errors = row_norms.float(), row_errors.float()
        kept = torch.empty(len(rows), dtype=torch.int64)
        self._kernels.keep_largest(
            address(rows),
            rows.stride(0),
            len(rows),
            depth,
            address(self._weight),
            address(self._errors),
            address(self._norms),
            address(row_norms),
            address(row_errors),
            num_columns,
            address(logits),
            logits.stride(0),
            address(kept),
            num_threads(),
        )
        self.num_rows += len(rows)
        self.num_kept += int(kept.sum())
        return logits

    @property
    def _pays(self) -> bool:
        most = _LARGEST_SHARE * self.num_rows * len(self._weight)
        return self.num_rows < _ROWS_TO_JUDGE or self.num_kept <= most
