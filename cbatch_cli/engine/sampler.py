"""From logits to token ids, vectorised over the sequences that sample in a step.

The filters are thresholds on the logits, each a function of its row alone: tokens whose logits
are equal are kept or dropped together. The token is then found by inverting the distribution
function in the order of the vocabulary with one counter-based number a row, so that a row's choice
depends on its own logits and its own noise, never on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.cpu_head import LargestLogits
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_sampling import RowMaxima, row_maxima
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.engine.likely_tokens import NUM_CANDIDATES, Filters, draw_likely
from cbatch_cli.engine.noise import uniforms
from cbatch_cli.request import SamplingParams

_RANDOM_ROWS_AT_ONCE = 8
"""Rows whose distribution function is held at once, so that memory stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """Ids `[N]`, and which rows had logits that mean nothing."""

    token_ids: NDArray[np.int64]
    is_broken: NDArray[np.bool_]


class Sampler:
    """Sampling parameters by slot, written when a sequence joins, read at every step.

    `seed` is the run's; `eos_token_ids` are held back until a row's `min_tokens`. `kernels` are for
    logits on a CPU.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        seed: int,
        eos_token_ids: frozenset[int],
        kernels: CPUKernels | None = None,
    ) -> None:
        self._kernels = kernels
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._rows = np.zeros(num_slots, dtype=np.int64)
        self._samples = np.zeros(num_slots, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        """Positions before this one may not hold a token that ends the sequence."""
        self._stop_ids: list[list[int]] = [[] for _ in range(num_slots)]

    def join(
        self, slot: int, params: SamplingParams, *, row: int, sample: int, num_prompt_tokens: int
    ) -> None:
        """Set the parameters of the sequence that takes up `slot`."""
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = self._seed if params.seed is None else params.seed
        self._rows[slot] = row
        self._samples[slot] = sample
        self._min_length[slot] = num_prompt_tokens + params.min_tokens
        eos = () if params.ignore_eos else self._eos_token_ids
        self._stop_ids[slot] = sorted({*params.stop_token_ids, *eos})

    def takes_largest(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """Whether `sample` will look at nothing but each row's largest logit."""
        holds_back = positions < self._min_length[slots]
        return not (self._temperature[slots].any() or holds_back.any())

    @torch.inference_mode()  # as the model's logits are, which could not be written to otherwise
    def sample(
        self,
        logits: Tensor | LargestLogits,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> SampledTokens:
        """Choose one id a row.

        `logits` is float32 `[N, vocab]` and is overwritten, or if `takes_largest` the largest of
        each row; `slots` and `positions` are `[N]`, a position being the place that the sampled
        token takes in its sequence.
        """
        if isinstance(logits, LargestLogits):
            is_broken = ~torch.isfinite(logits.values).numpy()
            return SampledTokens(token_ids=logits.token_ids.numpy(), is_broken=is_broken)
        for index in np.flatnonzero(positions < self._min_length[slots]):
            logits[index, self._stop_ids[slots[index]]] = -math.inf
        maxima = self._maxima(logits)
        # A row of nothing but -inf has no most probable token either.
        is_broken = ~torch.isfinite(maxima.best).cpu().numpy()
        chosen = maxima.best_ids.cpu().numpy()
        random_rows = np.flatnonzero((self._temperature[slots] > 0.0) & ~is_broken)
        if len(random_rows):
            self._draw(logits, maxima, random_rows, slots, positions, chosen)
        return SampledTokens(token_ids=chosen, is_broken=is_broken)

    def _maxima(self, logits: Tensor) -> RowMaxima:
        """The largest logit of each row; not a number if any of the row is not."""
        if self._kernels is not None and len(logits):
            return row_maxima(self._kernels, logits)
        best, best_ids = logits.max(dim=-1)
        return RowMaxima(best=best, best_ids=best_ids, block_maxima=best[:, None])

    def _draw(
        self,
        logits: Tensor,
        maxima: RowMaxima,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        chosen: NDArray[np.int64],
    ) -> None:
        """Draw ids for `rows` and write them into `chosen`."""
        filters = Filters(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
        )
        noise = uniforms(
            seeds=self._seeds[slots],
            rows=self._rows[slots],
            samples=self._samples[slots],
            positions=positions,
        )
        if self._kernels is not None:
            likely = rows[filters.of(rows).are_used]
            if len(likely):
                all_rows = len(likely) == len(logits)
                ids, counts = draw_likely(
                    self._kernels,
                    logits if all_rows else logits[torch.from_numpy(likely)],
                    maxima if all_rows else maxima.of(torch.from_numpy(likely)),
                    filters.of(likely),
                    noise[likely],
                )
                chosen[likely[counts]] = ids[counts]
                rows = np.setdiff1d(rows, likely[counts])
        for start in range(0, len(rows), _RANDOM_ROWS_AT_ONCE):
            part = rows[start : start + _RANDOM_ROWS_AT_ONCE]
            row_ids = torch.from_numpy(part).to(logits.device)
            chosen[part] = self._draw_from_all(
                logits[row_ids], maxima.best[row_ids], filters.of(part), noise[part]
            )

    def _draw_from_all(
        self, logits: Tensor, best: Tensor, filters: Filters, noise: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        temperature = self._like(filters.temperature, logits)
        scaled = (logits - best[:, None]) / temperature[:, None]
        kept = keep_filtered(scaled, top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)
        weights = torch.where(kept, scaled.exp(), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        target = self._like(noise, cumulative)[:, None] * cumulative[:, -1:]
        # The first token whose cumulative weight exceeds the target has a weight above 0.
        found = torch.searchsorted(cumulative, target, right=True)[:, 0]
        return found.cpu().numpy()

    @staticmethod
    def _like(values: NDArray[np.generic], tensor: Tensor) -> Tensor:
        return torch.from_numpy(values).to(device=tensor.device, dtype=tensor.dtype)


def keep_filtered(
    scaled: Tensor,
    *,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
) -> Tensor:
    """Which tokens top_k, then top_p, then min_p leave, as transformers' processors do.

    `scaled` is `[N, vocab]`: logits over temperature, less their maximum. Parameters are `[N]`;
    top_k 0, top_p 1 and min_p 0 filter nothing. Returns bool `[N, vocab]`.
    """
    vocab_size = scaled.shape[-1]
    kept = scaled > -math.inf
    use_k = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    use_p = np.flatnonzero(top_p < 1.0)
    if len(use_k) == 0 and len(use_p) == 0 and not min_p.any():
        return kept
    num_candidates = max(NUM_CANDIDATES if len(use_p) else 1, *top_k[use_k], 1)
    candidates = scaled.topk(min(num_candidates, vocab_size), dim=-1).values
    for index in use_k:
        kept[index] &= scaled[index] >= candidates[index, top_k[index] - 1]
    for index in use_p:
        threshold = _top_p_threshold(candidates[index], kept[index], scaled[index], top_p[index])
        if threshold is None:
            everything = scaled[index].sort(descending=True).values
            threshold = _top_p_threshold(everything, kept[index], scaled[index], top_p[index])
        if threshold is not None:
            kept[index] &= scaled[index] >= threshold
    for index in np.flatnonzero(min_p):
        kept[index] &= scaled[index] >= math.log(min_p[index])
    return kept


def _top_p_threshold(
    descending: Tensor, kept: Tensor, scaled: Tensor, top_p: float
) -> float | None:
    """The smallest value needed for the share `top_p` of what `kept` weighs.

    None when the values `descending`, the largest of a row, do not reach it.
    """
    cumulative = descending.exp().cumsum(dim=-1, dtype=torch.float64)
    num_kept = int(kept.sum())
    if num_kept <= len(descending):
        # Added one by one, so that the sum is the same however many are looked at.
        mass = float(cumulative[num_kept - 1])
    else:
        mass = float(torch.where(kept, scaled.exp(), 0.0).double().sum())
    reached = int(torch.searchsorted(cumulative, mass * top_p))
    return None if reached == len(descending) else float(descending[reached])
