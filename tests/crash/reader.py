"""Somebody who reads an output all the time, while runs write it and die."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import pyarrow as pa

from tests.crash.store import Store


class Reader:
    """While its block runs, a thread looks at the output of a store again and again.

    Leaving the block raises what the thread has seen go wrong.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._error: BaseException | None = None

    def _read(self) -> None:
        while not self._is_done.wait(0.002):
            try:
                self._store.check_whole()
            except FileNotFoundError:
                continue  # a part of an output that is being replaced
            except (AssertionError, OSError, pa.ArrowException) as error:
                self._store.counts.half_files += 1
                self._error = error
                return
            self._store.counts.reads += 1

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
        if self._error is not None and error is None:
            raise self._error
