"""A token budget that gives way when a step does not fit into memory. No torch here."""

from __future__ import annotations

from cbatch_cli.engine.scheduler import Scheduler

_STEPS_BEFORE_GROWTH = 64


class TokenLimit:
    """Halves the scheduler's budget after a step that did not fit, and doubles it in good times."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._most = scheduler.max_num_batched_tokens
        self._num_good_steps = 0

    def step_failed(self, num_tokens: int) -> None:
        """A step of so many tokens, more than one, did not fit."""
        self._num_good_steps = 0
        self._scheduler.limit_tokens(num_tokens // 2)

    def step_succeeded(self) -> None:
        """A step has run; after some of them a larger one is tried again."""
        budget = self._scheduler.max_num_batched_tokens
        if budget == self._most:
            return
        self._num_good_steps += 1
        if self._num_good_steps >= _STEPS_BEFORE_GROWTH:
            self._num_good_steps = 0
            self._scheduler.limit_tokens(min(2 * budget, self._most))
