"""Ends the process when a step never ends: a hung device cannot be interrupted. No torch here."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cbatch_cli.errors import EngineError

_POLL_S = 1.0


class Watchdog:
    """While its block runs, watches that no step takes longer than `timeout_s` seconds.

    `step_started_at` tells when the step that runs began, in monotonic time, None between steps.
    A step that takes longer is told on stderr, with what `describe` says of the engine and every
    thread's stack, and the process exits with the status of an `EngineError`.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        step_started_at: Callable[[], float | None],
        describe: Callable[[], str],
    ) -> None:
        self._timeout_s = timeout_s
        self._step_started_at = step_started_at
        self._describe = describe
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cbatch-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.wait(min(_POLL_S, self._timeout_s / 4)):
            started_at = self._step_started_at()
            if started_at is not None and time.monotonic() - started_at > self._timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        print(
            f"cbatch: error: a step has not ended in {self._timeout_s:g} s: {self._describe()}; "
            "what is finished is kept",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(EngineError.exit_code)
