"""SIGINT and SIGTERM: the first asks the run to stop in good order, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from cbatch_cli.errors import RunInterruptedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While its block runs, the first signal calls `on_first`; or, before that is set, raises.

    Does nothing outside of the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        self.received: signal.Signals | None = None
        self._earlier: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self.on_first is None:
            raise RunInterruptedError("interrupted before the first row", signal_number=number)
        self.on_first()
