"""What comes to the engine from other threads: requests, and orders to end some. No torch here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cbatch_cli.request import FinishReason, Request, RequestKey

_STOP_POLL_S = 0.2
"""How long an idle engine sleeps before it looks whether it was told to stop."""


class FinishCall(NamedTuple):
    """An order to end a generation."""

    key: RequestKey
    keep_n: int | None
    """Output ids to keep; None keeps all."""
    reason: FinishReason


class Inbox:
    """Thread-safe queues, and a thread that pulls requests while there is room for them.

    `num_waiting` tells how many requests the engine has taken and not admitted; these and those in
    here are pulled ahead up to `window`.
    """

    def __init__(self, *, window: int, num_waiting: Callable[[], int]) -> None:
        self._window = window
        self._num_waiting = num_waiting
        self._requests: deque[Request] = deque()
        self._finish_calls: deque[FinishCall] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._feed_error: BaseException | None = None
        self._feed_id = 0
        """Which source is pulled: the feeder of one that was left may still be waiting for it."""

    @property
    def feed_error(self) -> BaseException | None:
        """What the source raised."""
        return self._feed_error

    def put(self, request: Request) -> None:
        """Queue a request; never blocks."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def finish(self, call: FinishCall) -> None:
        """Queue an order; never blocks."""
        with self._changed:
            self._finish_calls.append(call)
            self._changed.notify_all()

    def feed(self, requests: Iterable[Request]) -> None:
        """Pull from a new source, on a thread of its own."""
        with self._changed:
            self._is_open = True
            self._feed_error = None
            self._feed_id += 1
        threading.Thread(
            target=self._pull, args=(requests, self._feed_id), name="cbatch-feeder", daemon=True
        ).start()

    def close(self) -> None:
        """Pull no more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def take(self) -> tuple[list[Request], list[FinishCall], bool]:
        """All that is queued, and whether more may come."""
        with self._changed:
            taken = list(self._requests), list(self._finish_calls), self._is_open
            self._requests.clear()
            self._finish_calls.clear()
        return taken

    def made_room(self) -> None:
        """Wake the feeder, after the engine has admitted or refused some, if it may pull again."""
        with self._changed:
            # Woken in vain, it would take the processor from a kernel at every step.
            if self._has_room():
                self._changed.notify_all()

    def wait(self) -> bool:
        """Sleep until something comes, or for a short while; False once nothing more can come."""
        with self._changed:
            if self._requests or self._finish_calls:
                return True
            if self._is_open:
                self._changed.wait(_STOP_POLL_S)
                return True
            return False

    def _pull(self, requests: Iterable[Request], feed_id: int) -> None:
        iterator = iter(requests)
        failure: BaseException | None = None
        try:
            while self._wait_for_room(feed_id):
                try:
                    request = next(iterator)
                except StopIteration:
                    break
                with self._changed:
                    if not self._is_fed_by(feed_id):
                        break
                    self._requests.append(request)
                    self._changed.notify_all()
        except BaseException as error:
            failure = error
        with self._changed:
            if self._feed_id == feed_id:
                self._feed_error = failure
                self.close()

    def _has_room(self) -> bool:
        return len(self._requests) + self._num_waiting() < self._window

    def _is_fed_by(self, feed_id: int) -> bool:
        return self._is_open and self._feed_id == feed_id

    def _wait_for_room(self, feed_id: int) -> bool:
        """Block until another request may be pulled; False once the source is left."""

        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or not self._is_fed_by(feed_id))
            return self._is_fed_by(feed_id)
