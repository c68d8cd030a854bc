"""Memory for large outputs on a CPU that is kept from one call to the next.

malloc gives blocks of tens of MB back to the system when they are freed, and the first write to
every page of the next one is a fault: for the logits of 32 rows over 262,144 words that took ten
times as long as writing them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_SMALLEST_KEPT = 4 * 2**20
"""Floats, 16 MiB: smaller blocks malloc keeps by itself."""
_OWN_REFERENCES = 2
"""To the array from `KeptMemory` alone: its attribute, and the argument of `getrefcount`."""


class KeptMemory:
    """Hands one block out again and again, never while a tensor made of it is alive."""

    def __init__(self) -> None:
        self._block = torch.empty(0).numpy()

    def empty(self, num_rows: int, num_columns: int) -> Tensor:
        """An uninitialised float32 `[num_rows, num_columns]`, of new memory if need be."""
        size = num_rows * num_columns
        if size < _SMALLEST_KEPT:
            return torch.empty(num_rows, num_columns)
        # Tensors share a storage with their views, and the storage holds the array.
        if self._block.size < size or sys.getrefcount(self._block) > _OWN_REFERENCES:
            self._block = torch.empty(size).numpy()
        return torch.from_numpy(self._block[:size]).view(num_rows, num_columns)
