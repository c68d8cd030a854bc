"""Sampling from a row's most probable tokens alone, where the filters leave no others.

Compiled kernels find these tokens in one pass over the logits; everything after it looks at a
thousand values a row in place of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_sampling import RowMaxima, exponential_sums, top_logits
from numpy.typing import NDArray
from torch import Tensor

NUM_CANDIDATES = 1024
"""Most probable tokens looked at first; the whole vocabulary only if they do not do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Of rows that are drawn at random, each `[N]`; top_k 0, top_p 1 and min_p 0 filter nothing."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    def of(self, rows: NDArray[np.generic]) -> Filters:
        """Those of some rows."""
        return Filters(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )

    @property
    def num_candidates(self) -> int:
        """How many of the most probable tokens tell what all filters leave, if so many do."""
        if not (self.top_k > 0).all():
            return NUM_CANDIDATES
        # One more than are kept shows that there are no more; whole vectors have no odd rest.
        return min(NUM_CANDIDATES, (int(self.top_k.max()) // 64 + 1) * 64)

    @property
    def are_used(self) -> NDArray[np.bool_]:
        """`[N]`: whether a row has any."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def draw_likely(
    kernels: CPUKernels,
    logits: Tensor,
    maxima: RowMaxima,
    filters: Filters,
    noise: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """One id a row of float32 `[N, vocab]`, drawn with `noise` `[N]`, and whether it counts.

    It does where every token that the filters leave is among the most probable ones: it is then
    the token that looking at the whole vocabulary would give.
    """
    vocab_size = logits.shape[1]
    count = min(filters.num_candidates, vocab_size)
    values, ids = top_logits(kernels, logits, maxima, count)
    temperature = torch.from_numpy(filters.temperature)
    scaled = (values - maxima.best[:, None]) / temperature[:, None]
    weights = scaled.exp()
    top_k, top_p = torch.from_numpy(filters.top_k), torch.from_numpy(filters.top_p)

    uses_k = (top_k > 0) & (top_k < vocab_size)
    smallest_of_k = scaled.gather(1, (top_k.clamp(1, count) - 1)[:, None])[:, 0]
    lowest = torch.where(uses_k, smallest_of_k, -torch.inf)
    # What comes after the last may be as probable as it is.
    has_rest = count < vocab_size
    counts = ~uses_k | (top_k <= count)
    if has_rest:
        counts &= ~uses_k | (scaled[:, -1] < lowest)

    uses_p = top_p < 1.0
    if uses_p.any():
        # Added one by one, so that the sum is the same however many are looked at.
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        num_kept = (scaled >= lowest[:, None]).sum(dim=-1, keepdim=True)
        mass = cumulative.gather(1, num_kept - 1)[:, 0]
        if not uses_k.all():
            everything = exponential_sums(kernels, logits, maxima, 1.0 / temperature)
            mass = torch.where(uses_k, mass, everything)
        reached = torch.searchsorted(cumulative, (mass * top_p)[:, None])[:, 0]
        counts &= ~uses_p | (reached < count)
        smallest_of_p = scaled.gather(1, reached.clamp(max=count - 1)[:, None])[:, 0]
        lowest = torch.where(uses_p, torch.maximum(lowest, smallest_of_p), lowest)
    min_p = torch.from_numpy(filters.min_p)
    lowest = torch.maximum(lowest, min_p.log().to(lowest.dtype))
    if has_rest:
        counts &= scaled[:, -1] < lowest

    ids, order = ids.sort(dim=-1)
    kept = torch.where(scaled >= lowest[:, None], weights, 0.0).gather(1, order)
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    target = torch.from_numpy(noise)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)
    chosen = ids.gather(1, found.clamp(max=count - 1))[:, 0]
    return chosen.numpy(), counts.numpy()
