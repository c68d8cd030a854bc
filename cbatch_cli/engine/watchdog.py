"""Ends the process when a step never ends: a hung device cannot be interrupted. No torch here."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

from cbatch_cli.engine.core import EngineCore
from cbatch_cli.errors import EngineError

_POLL_S = 1.0


class Watchdog:
    """While its block runs, watches that no step takes longer than `timeout_s` seconds.

    One that does is told on stderr, with the engine's state and every thread's stack, and the
    process exits with the status of an `EngineError`. Rows that were finished are on disk.
    """

    def __init__(self, core: EngineCore, *, timeout_s: float) -> None:
        self._core = core
        self._timeout_s = timeout_s
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
            started_at = self._core.step_started_at
            if started_at is not None and time.monotonic() - started_at > self._timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        scheduler, stats = self._core.scheduler, self._core.stats
        print(
            f"cbatch: error: step {stats.num_steps - 1} has not ended in {self._timeout_s:g} s: "
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{scheduler.blocks.usage:.0%} of the KV cache in use, "
            f"{stats.num_output_tokens} tokens made; run the same command again to resume",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(EngineError.exit_code)
