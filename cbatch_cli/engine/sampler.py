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
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.engine.noise import uniforms
from cbatch_cli.request import SamplingParams

_NUM_CANDIDATES = 1024
"""Most probable tokens looked at first for top_p; the whole vocabulary only if they do not do."""
_RANDOM_ROWS_AT_ONCE = 8
"""Rows whose distribution function is held at once, so that memory stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """Ids `[N]`, and which rows had logits that mean nothing."""

    token_ids: NDArray[np.int64]
    is_broken: NDArray[np.bool_]


class Sampler:
    """Sampling parameters by slot, written when a sequence joins, read at every step.

    `seed` is the run's; `eos_token_ids` are held back until a row's `min_tokens`.
    """

    def __init__(self, *, num_slots: int, seed: int, eos_token_ids: frozenset[int]) -> None:
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
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> SampledTokens:
        """Choose one id a row.

        `logits` is float32 `[N, vocab]` and is overwritten; `slots` and `positions` are `[N]`, a
        position being the place that the sampled token takes in its sequence.
        """
        for index in np.flatnonzero(positions < self._min_length[slots]):
            logits[index, self._stop_ids[slots[index]]] = -math.inf
        best, best_ids = logits.max(dim=-1)
        # NaN wins a maximum, and a row of nothing but -inf has no most probable token.
        is_broken = ~torch.isfinite(best).cpu().numpy()
        chosen = best_ids.cpu().numpy()
        random_rows = np.flatnonzero((self._temperature[slots] > 0.0) & ~is_broken)
        for start in range(0, len(random_rows), _RANDOM_ROWS_AT_ONCE):
            rows = random_rows[start : start + _RANDOM_ROWS_AT_ONCE]
            row_ids = torch.from_numpy(rows).to(logits.device)
            chosen[rows] = self._sample_random(
                logits[row_ids], best[row_ids], slots[rows], positions[rows]
            )
        return SampledTokens(token_ids=chosen, is_broken=is_broken)

    def _sample_random(
        self,
        logits: Tensor,
        best: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        temperature = self._like(self._temperature[slots], logits)
        scaled = (logits - best[:, None]) / temperature[:, None]
        kept = keep_filtered(
            scaled, top_k=self._top_k[slots], top_p=self._top_p[slots], min_p=self._min_p[slots]
        )
        weights = torch.where(kept, scaled.exp(), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        noise = uniforms(
            seeds=self._seeds[slots],
            rows=self._rows[slots],
            samples=self._samples[slots],
            positions=positions,
        )
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
    num_candidates = max(_NUM_CANDIDATES if len(use_p) else 1, *top_k[use_k], 1)
    candidates = scaled.topk(min(num_candidates, vocab_size), dim=-1).values
    for index in use_k:
        kept[index] &= scaled[index] >= candidates[index, top_k[index] - 1]
    for index in use_p:
        mass = float(torch.where(kept[index], scaled[index].exp(), 0.0).double().sum())
        threshold = _top_p_threshold(candidates[index], kept_mass=mass * top_p[index])
        if threshold is None:
            everything = scaled[index].sort(descending=True).values
            threshold = _top_p_threshold(everything, kept_mass=mass * top_p[index])
        if threshold is not None:
            kept[index] &= scaled[index] >= threshold
    for index in np.flatnonzero(min_p):
        kept[index] &= scaled[index] >= math.log(min_p[index])
    return kept


def _top_p_threshold(descending: Tensor, *, kept_mass: float) -> float | None:
    """The smallest value needed to reach `kept_mass`; None when all values do not reach it."""
    cumulative = descending.double().exp().cumsum(dim=-1)
    reached = int(torch.searchsorted(cumulative, kept_mass))
    return None if reached == len(descending) else float(descending[reached])
