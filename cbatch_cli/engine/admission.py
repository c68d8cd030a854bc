"""When waiting sequences may start. No torch here."""

from __future__ import annotations

from typing import Protocol


class AdmissionPolicy(Protocol):
    """How many waiting sequences may start in a step, slots and memory permitting."""

    def admission_limit(self, *, num_running: int, num_waiting: int, input_open: bool) -> int:
        """The most sequences to admit now."""
        ...


class ContinuousAdmission:
    """Fill every free slot at once."""

    def admission_limit(self, *, num_running: int, num_waiting: int, input_open: bool) -> int:
        """Whoever waits may start."""
        return num_waiting


class StaticAdmission:
    """The baseline: admit a batch, run it until its last sequence is done, admit the next.

    Prompts are not padded and finished slots are not computed, so what it loses against
    continuous batching is due to the schedule alone.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def admission_limit(self, *, num_running: int, num_waiting: int, input_open: bool) -> int:
        """A whole batch once nothing runs, and only a full one while more may come."""
        if num_running or (input_open and num_waiting < self._batch_size):
            return 0
        return num_waiting
