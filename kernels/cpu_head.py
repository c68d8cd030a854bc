"""The product with a vocabulary on a CPU, cheaper where only the largest logit is asked for.

Logits that are not asked for are not written. Where they are float32, a product of 8-bit weights
and activations, which reads a quarter of the bytes, bounds every one; those that can be the largest
are then computed in float32, to the bits of the float32 product. The bound is proved, so the
largest logit is the float32 product's own.

With w the weight of a column and q its rounding, x the row and y its rounding, |.| the Euclidean
norm, K the depth, G the number of groups and u = 2^-24, up to factors of 1 + O(K u):

    |q.y - w.x|           <= |w - q| |x| + |q| |y - x|       (Cauchy-Schwarz)
    |float32 w.x - w.x|   <= (K + 1) u |w| |x|               (a chain of K or, without FMA, K + 1)
    |8-bit q.y - q.y|     <= (2 G + 2) u 16 |q| |x|          (2 G terms, each of 2 roundings)
    |q|                   <= |w| + |w - q|

The 8-bit product sums integers exactly. Of a group g of n <= 64 depths with the middle m it then
has the terms q_g.(y_g - m) and q_g.m; neither exceeds |q_g| sqrt(n) max|x_g| <= 8 |q_g| |x_g|,
since the middle lies among the x_g. So a logit is within

    (|w - q| + c (|w| + |w - q|)) |x| + (|w| + |w - q|) |y - x|

of the 8-bit one, with c the sum of the roundings. Norms are those of what was rounded in fact, and
the first factors the largest of a panel of columns, made here; the second ones are made by
kernels/cpu/vocabulary.h. No factor is below 2^-64: a product of two of them is more than what both
products lose below the smallest float32, at most 2 K + 3 G times 2^-150. Where |w| |x| is so large
that anything could overflow, all columns are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from cbatch_kernels.cpu_library import CPUKernels, address, num_threads
from cbatch_kernels.cpu_linear import LinearMode, choose_linear, rounds_weights
from cbatch_kernels.cpu_packed import GroupedInt8Linear, Int8Linear, Linear
from torch import Tensor

_UNIT_ROUNDOFF = 2.0**-24
_FEW_ROUNDINGS = 64
"""More than the roundings of a logit that do not grow with the depth."""
_MARGIN = 1.001
"""For the roundings of the bounds themselves."""
_LEAST_FACTOR = 2.0**-64
_LARGEST_SHARE = 0.05
"""Share of the columns computed twice above which the float32 product alone is faster."""
_ROWS_TO_JUDGE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestLogits:
    """The largest logit of each row."""

    values: Tensor
    """float32 `[T]`; not a number where a logit of the row is not."""
    token_ids: Tensor
    """int64 `[T]`: the first of the largest."""


class VocabularyHead:
    """Logits `[T, V]` of float32 rows `[T, K]` and a weight `[V, K]`.

    In a mode that rounds weights, logits are those of the 8-bit product. In the others there must
    be no bias; what a call needs is then made in the first one that needs it: all logits need the
    weight packed, the largest alone needs its 8-bit form. The weight itself must stay as it is.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, mode: LinearMode, kernels: CPUKernels
    ) -> None:
        self.is_rounded = rounds_weights(mode)
        if bias is not None and not self.is_rounded:
            raise ValueError("a bias is for logits of an 8-bit product")
        self._weight, self._mode, self._kernels = weight.contiguous(), mode, kernels
        self.num_columns = len(weight)
        self._all: Linear | None = None
        self._search: _Search | None = None
        self.kind = "two_stage"
        """How the largest logit is found."""
        if self.is_rounded:
            self._all = choose_linear(weight, bias, mode=mode, kernels=kernels)
            self._search = _Search(self._all, None, bias, kernels)
            self.kind = self._all.kind
        self.num_rows = 0
        """Rows of which only the largest logit was computed."""
        self.num_exact = 0
        """Logits of these rows that were computed in float32."""

    def all_logits(self, rows: Tensor) -> Tensor:
        """`[T, K]` to `[T, V]`."""
        if self._all is None:
            self._all = choose_linear(self._weight, None, mode=self._mode, kernels=self._kernels)
        return self._all(rows)

    def release_all_logits(self) -> None:
        """Let go of a weight that is packed for all logits, until they are asked for again."""
        if not self.is_rounded:
            self._all = None

    def largest_logits(self, rows: Tensor) -> LargestLogits | None:
        """The largest of `all_logits(rows)`, or None where it is cheaper to compute all."""
        most = _LARGEST_SHARE * self.num_rows * self.num_columns
        if self.num_rows >= _ROWS_TO_JUDGE and self.num_exact > most:
            return None
        if self._search is None:
            rounded = GroupedInt8Linear(self._weight, None, self._kernels)
            self._search = _Search(rounded, self._weight, None, self._kernels)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        largest, num_exact = self._search.largest(rows)
        self.num_rows += len(rows)
        self.num_exact += num_exact
        return largest


class _Search:
    """Finds largest outputs: of `rounded`, or with `weight` `[V, K]` of the float32 product."""

    def __init__(
        self,
        rounded: Linear,
        weight: Tensor | None,
        bias: Tensor | None,
        kernels: CPUKernels,
    ) -> None:
        assert isinstance(rounded, Int8Linear | GroupedInt8Linear)
        self._rounded, self._weight, self._kernels = rounded, weight, kernels
        # Columns that only fill the last panel lose to all others.
        self._bias = self._padded(
            torch.zeros(rounded.num_columns) if bias is None else bias.float(), -math.inf
        )
        self._errors = self._norms = None
        self._largest_norm = 0.0
        if weight is not None:
            assert isinstance(rounded, GroupedInt8Linear)
            num_groups = math.ceil(rounded.depth / rounded.group)
            num_roundings = rounded.depth + 32 * num_groups + _FEW_ROUNDINGS
            norms = rounded.norms + rounded.errors
            roundings = 1.01 * _UNIT_ROUNDOFF * num_roundings * norms
            self._errors = self._factors(rounded.errors + roundings)
            self._norms = self._factors(norms)
            # A panel that is not finite may always have the largest.
            self._largest_norm = float(self._norms.nan_to_num(0.0, posinf=0.0).max())

    def largest(self, rows: Tensor) -> tuple[LargestLogits, int]:
        """Of rows `[T, K]` with stride 1; and how many outputs were computed in float32."""
        num_rows = len(rows)
        largest = LargestLogits(
            values=torch.empty(num_rows), token_ids=torch.empty(num_rows, dtype=torch.int64)
        )
        num_exact = torch.empty(num_rows, dtype=torch.int64)
        found = (address(largest.values), address(largest.token_ids), address(num_exact))
        given = (address(rows), rows.stride(0), num_rows, rows.shape[1])
        rounded = self._rounded
        if isinstance(rounded, GroupedInt8Linear):
            self._kernels.largest_int8_groups(
                *given,
                address(rounded.packed),
                address(self._bias),
                rounded.num_columns,
                address(self._weight),
                address(self._errors),
                address(self._norms),
                self._largest_norm,
                *found,
                num_threads(),
            )
        else:
            self._kernels.largest_int8(
                *given,
                address(rounded.packed),
                address(rounded.scales),
                address(self._bias),
                rounded.num_columns,
                rounded.group,
                *found,
                num_threads(),
            )
        return largest, int(num_exact.sum())

    def _factors(self, bounds: Tensor) -> Tensor:
        """The largest of each panel's columns, not a number where one of them is not."""
        panels = self._padded(bounds, 0.0).view(-1, self._kernels.panel)
        return (_MARGIN * panels.amax(dim=1)).clamp(min=_LEAST_FACTOR)

    def _padded(self, of_columns: Tensor, value: float) -> Tensor:
        """With `value` for the columns that fill the last panel."""
        missing = -len(of_columns) % self._kernels.panel
        return torch.nn.functional.pad(of_columns, (0, missing), value=value).contiguous()
