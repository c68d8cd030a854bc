"""From logits to token ids without leaving the device.

Ids are not read back to be used: the next step takes them from `last_token_ids`. What is kept by
top_k, top_p and min_p, what is held back and which rows have logits that mean nothing is as with
the host's sampler; a token is drawn by adding noise to the logits, which as there is a function of
(seed, row, sample, position) alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.request import SamplingParams

_FLOATS = ("temperature", "top_p", "min_p")
_INTEGERS = ("seeds", "rows", "samples")
_ALIGNED = 4
"""Parameters are gathered by so many, since Triton compiles anew for tensors less aligned."""


class SamplingKernels(Protocol):
    """What `cbatch_kernels.sampling` has, whose documentation holds."""

    def scale_logits(self, logits: Tensor, temperature: Tensor) -> None:
        """Divide by the temperature, in place."""

    def filter_thresholds(
        self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, thresholds: Tensor
    ) -> None:
        """Write the least logit that is kept."""

    def gumbel_argmax(
        self,
        logits: Tensor,
        temperature: Tensor,
        thresholds: Tensor,
        token_ids: Tensor,
        *,
        seeds: Tensor,
        rows: Tensor,
        samples: Tensor,
        positions: Tensor,
    ) -> None:
        """Write one id a row, or -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """How the sequences that sample in one step do so."""

    arrays: Mapping[str, NDArray[Any]]
    """What the device must be given before `DeviceSampler.sample`."""
    is_random: bool
    """Whether any row has a temperature."""
    is_filtered: bool
    """Whether any of these has a top_k, top_p or min_p."""


class DeviceSampler:
    """Sampling parameters by slot, on the host and on the device.

    The device's are written again only when a sequence has joined. `seed` is the run's;
    `eos_token_ids` are held back until a row's `min_tokens`.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        seed: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        kernels: SamplingKernels,
    ) -> None:
        self._seed = seed
        self._eos_token_ids = eos_token_ids
        self._kernels = kernels
        self._host_floats = np.ones((len(_FLOATS), num_slots), dtype=np.float32)
        self._host_integers = np.zeros((len(_INTEGERS), num_slots), dtype=np.int64)
        self._host_top_k = np.zeros(num_slots, dtype=np.int32)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        """Positions before this one may not hold a token that ends the sequence."""
        self._stop_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self._is_changed = True
        self._floats = torch.zeros(self._host_floats.shape, dtype=torch.float32, device=device)
        self._integers = torch.zeros(self._host_integers.shape, dtype=torch.int64, device=device)
        self._top_k = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._minus_inf = torch.full((), -math.inf, device=device)
        self.last_token_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """By slot the id that was sampled last."""

    def join(
        self, slot: int, params: SamplingParams, *, row: int, sample: int, num_prompt_tokens: int
    ) -> None:
        """Set the parameters of the sequence that takes up `slot`."""
        seed = self._seed if params.seed is None else params.seed
        self._host_floats[:, slot] = params.temperature, params.top_p, params.min_p
        # Seeds have 64 bits and no sign.
        self._host_integers[:, slot] = np.uint64(seed).astype(np.int64), row, sample
        self._host_top_k[slot] = params.top_k
        self._min_length[slot] = num_prompt_tokens + params.min_tokens
        eos = () if params.ignore_eos else self._eos_token_ids
        self._stop_ids[slot] = sorted({*params.stop_token_ids, *eos})
        self._is_changed = True

    def plan(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingPlan:
        """What the sequences in `slots` `[N]` need to sample tokens for `positions` `[N]`."""
        padding = np.zeros(-len(slots) % _ALIGNED, dtype=np.int64)
        arrays: dict[str, NDArray[Any]] = {
            "sample_slots": slots,
            "padded_slots": np.concatenate([slots, padding]),
            "sample_positions": positions,
        }
        temperature, top_p, min_p = self._host_floats[:, slots]
        is_filtered = (top_p < 1.0) | (min_p > 0.0) | (self._host_top_k[slots] > 0)
        held_rows = [
            (row, token_id)
            for row in np.flatnonzero(positions < self._min_length[slots])
            for token_id in self._stop_ids[slots[row]]
        ]
        if held_rows:
            arrays["held_back"] = np.array(held_rows, dtype=np.int64).T
        if self._is_changed:
            arrays["floats"] = self._host_floats
            arrays["integers"] = self._host_integers
            arrays["top_k"] = self._host_top_k
            self._is_changed = False
        return SamplingPlan(
            arrays=arrays,
            is_random=bool((temperature > 0.0).any()),
            is_filtered=bool(is_filtered[temperature > 0.0].any()),
        )

    def sample(self, logits: Tensor, plan: SamplingPlan, inputs: Mapping[str, Tensor]) -> Tensor:
        """Choose one id a row, int64 `[N]`; -1 for a row whose logits mean nothing.

        `logits` is float32 `[N, vocab]` and is overwritten; `inputs` holds the plan's arrays on
        the device.
        """
        if "floats" in inputs:
            self._floats.copy_(inputs["floats"])
            self._integers.copy_(inputs["integers"])
            self._top_k.copy_(inputs["top_k"])
        if "held_back" in inputs:
            rows, token_ids = inputs["held_back"]
            logits.index_put_((rows, token_ids), self._minus_inf)
        slots, padded_slots = inputs["sample_slots"], inputs["padded_slots"]
        num_rows = len(slots)
        temperature, top_p, min_p = self._floats.index_select(1, padded_slots)[:, :num_rows]
        seeds, input_rows, samples = self._integers.index_select(1, padded_slots)[:, :num_rows]
        thresholds = torch.full_like(temperature, -math.inf)
        if plan.is_random:
            # A temperature near 0 may not turn the largest logits into infinity.
            logits.sub_(logits.amax(dim=-1, keepdim=True))
            self._kernels.scale_logits(logits, temperature)
        if plan.is_filtered:
            top_k = self._top_k.index_select(0, slots)
            self._kernels.filter_thresholds(logits, top_k, top_p, min_p, thresholds)
        sampled = torch.empty_like(slots)
        self._kernels.gumbel_argmax(
            logits,
            temperature,
            thresholds,
            sampled,
            seeds=seeds,
            rows=input_rows,
            samples=samples,
            positions=inputs["sample_positions"],
        )
        # The next step looks up the embedding of whatever stands here.
        self.last_token_ids.index_copy_(0, slots, sampled.clamp_min(0))
        return sampled
