"""What other threads put into the engine's inbox comes out once, and only while it is wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cbatch_cli.engine.inbox import FinishCall, Inbox
from cbatch_cli.request import FinishReason, Request, RequestKey
from tests.fakes import make_request

WINDOW = 3


def new_inbox(num_waiting: Callable[[], int] = lambda: 0) -> Inbox:
    return Inbox(window=WINDOW, num_waiting=num_waiting)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


class Source:
    """Requests without end, some of which wait to be let through; counts those that were asked."""

    def __init__(self, first_row: int = 0, *, held_at: int | None = None) -> None:
        self.num_pulled = 0
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()
        self._first_row, self._held_at = first_row, held_at

    def __iter__(self) -> Iterator[Request]:
        while True:
            number, self.num_pulled = self.num_pulled, self.num_pulled + 1
            if number == self._held_at:
                self.is_held.set()
                assert self.may_go_on.wait(20)
            yield make_request(self._first_row + number, [1], max_tokens=1)


def rows_of(requests: list[Request]) -> list[int]:
    return [request.key.row for request in requests]


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cbatch-feeder"]


@pytest.fixture(autouse=True)
def _leave_no_feeder() -> Iterator[None]:
    yield
    wait_until(lambda: not feeders())


def test_the_window_is_filled_and_no_more() -> None:
    waiting = 1
    inbox, source = new_inbox(lambda: waiting), Source()
    inbox.feed(source)
    wait_until(lambda: source.num_pulled == WINDOW - waiting)
    time.sleep(0.05)
    assert source.num_pulled == WINDOW - waiting
    assert rows_of(inbox.take()[0]) == [0, 1]
    waiting = WINDOW
    inbox.made_room()
    time.sleep(0.05)
    assert source.num_pulled == 2, "what was taken has not been admitted yet"
    waiting = 0
    inbox.made_room()
    wait_until(lambda: source.num_pulled == 2 + WINDOW)
    assert rows_of(inbox.take()[0]) == [2, 3, 4]
    inbox.close()


def test_what_was_taken_is_not_given_again() -> None:
    inbox = new_inbox()
    order = FinishCall(RequestKey(4), 2, FinishReason.STOP_SEQUENCE)
    inbox.put(make_request(4, [1], max_tokens=1))
    inbox.finish(order)
    requests, orders, may_come = inbox.take()
    assert rows_of(requests) == [4] and orders == [order] and may_come
    assert inbox.take() == ([], [], True)


def test_a_source_that_was_left_feeds_no_more() -> None:
    """It is asked for a request, and gives it after the next source has taken its place."""
    inbox, old, new = new_inbox(), Source(held_at=1), Source(first_row=100)
    inbox.feed(old)
    assert old.is_held.wait(20)
    inbox.close()
    assert rows_of(inbox.take()[0]) == [0]
    inbox.feed(new)
    wait_until(lambda: new.num_pulled == WINDOW)
    inbox.take()
    old.may_go_on.set()
    wait_until(lambda: len(feeders()) == 1)
    assert old.num_pulled == 2
    inbox.made_room()
    wait_until(lambda: new.num_pulled == 2 * WINDOW)
    assert rows_of(inbox.take()[0]) == [103, 104, 105]
    inbox.close()


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_source_that_was_left_is_not_that_of_the_next(fails: bool) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def ending() -> Iterator[Request]:
        is_held.set()
        assert may_end.wait(20)
        if fails:
            raise OSError("disk gone")
        yield from ()

    inbox, new = new_inbox(), Source()
    inbox.feed(ending())
    assert is_held.wait(20)
    inbox.close()
    inbox.feed(new)
    may_end.set()
    wait_until(lambda: len(feeders()) == 1)
    assert inbox.feed_error is None
    assert inbox.take()[2], "the new source goes on"
    inbox.close()


def test_an_error_belongs_to_its_source() -> None:
    def broken() -> Iterator[Request]:
        yield make_request(0, [1], max_tokens=1)
        raise OSError("disk gone")

    inbox = new_inbox()
    inbox.feed(broken())
    wait_until(lambda: inbox.feed_error is not None)
    assert str(inbox.feed_error) == "disk gone"
    assert inbox.wait(), "a request is still there"
    requests, _, may_come = inbox.take()
    assert rows_of(requests) == [0] and not may_come
    assert not inbox.wait()
    inbox.feed([])
    wait_until(lambda: not inbox.take()[2])
    assert inbox.feed_error is None
