"""What the engine counts over a run, in constant memory. No torch here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cbatch_cli.engine.sequence import Sequence
from cbatch_cli.engine.step import SchedulerOutput
from cbatch_cli.metrics import DurationHistogram

DEVICE_PHASES = ("forward", "sample")


class EngineStats:
    """Sums over steps and sequences.

    Occupancy is running sequences over their limit, averaged over steps. In a saturated step
    somebody waits, so that a free slot is a loss; the tail begins when nobody waits any more.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.num_steps = 0
        self.num_saturated_steps = 0
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.started_at: float | None = None
        """Monotonic time of the first step; None before."""
        self.last_step_at = 0.0
        self._tail_started_at: float | None = None
        self._running_sum = 0
        self._saturated_running_sum = 0
        self._kv_cache_usage_sum = 0.0
        self._kv_cache_usage_max = 0.0
        self.phases_s: defaultdict[str, float] = defaultdict(float)
        self.device_s = 0.0
        """Time that steps took on a device that measures it; 0 where the CPU computes them."""
        self.queue_s = DurationHistogram()
        self.ttft_s = DurationHistogram()
        self.itl_s = DurationHistogram()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the wall time of a block under `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] += time.monotonic() - start

    def start_step(self, output: SchedulerOutput, *, kv_cache_usage: float) -> None:
        """Count a step as it is scheduled."""
        now = time.monotonic()
        if self.started_at is None:
            self.started_at = now
        self.num_steps += 1
        self.num_running = output.num_running
        self.num_waiting = output.num_waiting
        self._running_sum += output.num_running
        self.num_computed_tokens += output.num_tokens
        self.kv_cache_usage = kv_cache_usage
        self._kv_cache_usage_sum += kv_cache_usage
        self._kv_cache_usage_max = max(self._kv_cache_usage_max, kv_cache_usage)
        if output.num_waiting:
            self.num_saturated_steps += 1
            self._saturated_running_sum += output.num_running
            self._tail_started_at = None
        elif self._tail_started_at is None:
            self._tail_started_at = now

    def end_step(self, *, num_sampled: int) -> None:
        """Count the ids that a step brought."""
        self.num_output_tokens += num_sampled
        self.last_step_at = time.monotonic()

    def add_finished(self, sequence: Sequence) -> None:
        """Count a sequence that has ended."""
        metrics = sequence.metrics()
        self.num_prompt_tokens += metrics.prompt_tokens
        self.num_cached_tokens += metrics.cached_tokens
        if metrics.queue_s is not None:
            self.queue_s.add(metrics.queue_s)
        if metrics.ttft_s is not None:
            self.ttft_s.add(metrics.ttft_s)
        for gap in sequence.inter_token_s:
            self.itl_s.add(gap)

    @property
    def wall_s(self) -> float:
        """From the first step to the last."""
        return 0.0 if self.started_at is None else self.last_step_at - self.started_at

    def summary(self) -> dict[str, Any]:
        """The engine's share of the run's summary object."""
        steps = max(self.num_steps, 1)
        busy_s = self.device_s or sum(self.phases_s[name] for name in DEVICE_PHASES)
        tail_from = self._tail_started_at or self.last_step_at
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "output_tokens_per_s": _rate(self.num_output_tokens, self.wall_s),
            "total_tokens_per_s": _rate(
                self.num_prompt_tokens + self.num_output_tokens, self.wall_s
            ),
            "steps": self.num_steps,
            "step_occupancy": round(self._running_sum / steps / self._max_num_seqs, 4),
            "step_occupancy_until_tail": round(
                self._saturated_running_sum / max(self.num_saturated_steps, 1) / self._max_num_seqs,
                4,
            )
            if self.num_saturated_steps
            else None,
            "token_occupancy": round(
                self.num_computed_tokens / steps / self._max_num_batched_tokens, 4
            ),
            "device_idle_fraction": round(max(0.0, 1 - busy_s / self.wall_s), 4)
            if self.wall_s
            else 0.0,
            "kv_cache_usage": {
                "mean": round(self._kv_cache_usage_sum / steps, 4),
                "max": round(self._kv_cache_usage_max, 4),
            },
            "preemptions": self.num_preemptions,
            "recomputed_tokens": self.num_recomputed_tokens,
            "prefix_hit_rate": _rate(self.num_cached_tokens, self.num_prompt_tokens),
            "queue_s": self.queue_s.percentiles().as_dict(),
            "ttft_s": self.ttft_s.percentiles().as_dict(),
            "itl_s": self.itl_s.percentiles().as_dict(),
            "phases_s": {name: round(value, 4) for name, value in sorted(self.phases_s.items())},
            "tail_s": round(self.last_step_at - tail_from, 4),
        }


def _rate(count: int, per: float) -> float:
    return round(count / per, 4) if per else 0.0
