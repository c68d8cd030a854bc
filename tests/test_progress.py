"""What a run shows while it works."""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import termios
from typing import Any

import pytest

from cbatch_cli.metrics import RunSnapshot
from cbatch_cli.progress import RecentRates, open_progress, rows_text, status_text


class Terminal(io.StringIO):
    """Text that is kept, on a terminal of the given width."""

    def __init__(self, columns: int = 120) -> None:
        super().__init__()
        self._descriptors = os.openpty()
        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptors[1]

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        super().close()


class ClosedPipe(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def write(self, text: str) -> int:
        self.attempts += 1
        raise BrokenPipeError


def snapshot(elapsed_s: float, **changes: Any) -> RunSnapshot:
    fields: dict[str, Any] = {
        "elapsed_s": elapsed_s,
        "rows_done": 240,
        "rows_failed": 3,
        "rows_total": 1000,
        "num_running": 32,
        "num_waiting": 118,
        "kv_cache_usage": 0.84,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "eta_s": 312.0,
    }
    return RunSnapshot(**(fields | changes))


def test_rates_cover_the_recent_window_only() -> None:
    rates = RecentRates(window_s=10.0)
    for second in range(1, 101):
        # 1000 output tokens/s until second 50, 10 tokens/s from there.
        tokens = 1000 * min(second, 50) + 10 * max(second - 50, 0)
        found = rates.add(snapshot(float(second), output_tokens=tokens, prompt_tokens=5 * second))
        if second == 40:
            assert found == pytest.approx((5.0, 1000.0))
        if second == 55:
            assert found == pytest.approx((5.0, (5 * 1000 + 5 * 10) / 10))
    assert found == pytest.approx((5.0, 10.0))


def test_rates_of_samples_further_apart_than_the_window() -> None:
    rates = RecentRates(window_s=10.0)
    assert rates.add(snapshot(30.0, output_tokens=300)).output == pytest.approx(10.0)
    assert rates.add(snapshot(60.0, output_tokens=900)).output == pytest.approx(20.0)


def test_no_time_is_no_rate() -> None:
    assert RecentRates().add(snapshot(0.0, output_tokens=9)) == (0.0, 0.0)


def test_the_status_says_everything_a_user_waits_for() -> None:
    text = status_text(snapshot(1.0), RecentRates().add(snapshot(2.0, output_tokens=190)))
    assert text == "ETA 05:12, 0 in 95 out tok/s, 32 run 118 wait, KV 84%"
    assert rows_text(snapshot(1.0)) == "240/1,000 rows, 3 failed"
    assert rows_text(snapshot(1.0, rows_total=None, rows_failed=0)) == "240 rows"
    assert status_text(snapshot(1.0, eta_s=None), RecentRates().add(snapshot(1.0))).startswith(
        "ETA ?"
    )


def test_plain_lines_come_every_30_seconds() -> None:
    stream = io.StringIO()
    display = open_progress("auto", stream)
    for second in range(100):
        display.update(snapshot(float(second), output_tokens=10 * second))
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("]")[0] for line in lines] == ["[00:30", "[01:00", "[01:30"]
    assert lines[2] == (
        "[01:30] 240/1,000 rows, 3 failed, ETA 05:12, 0 in 10 out tok/s, 32 run 118 wait, KV 84%"
    )


def test_plain_stays_plain_on_a_terminal() -> None:
    stream = Terminal()
    display = open_progress("plain", stream)
    display.update(snapshot(31.0))
    display.close()
    assert stream.getvalue().startswith("[00:31] 240/1,000 rows")
    assert "\r" not in stream.getvalue()


def test_json_lines_hold_the_snapshot_and_the_end() -> None:
    stream = io.StringIO()
    display = open_progress("json", stream)
    display.write("loading")
    for tenth in range(1, 25):
        display.update(snapshot(tenth / 10, output_tokens=tenth, eta_s=None))
    display.close()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert events[0] == {"event": "message", "text": "loading"}
    assert [event["elapsed_s"] for event in events[1:]] == [0.1, 1.1, 2.1, 2.4]
    assert events[-1]["output_tokens_per_s"] == pytest.approx(10.0)
    assert events[-1]["rows_failed"] == 3
    assert events[-1]["eta_s"] is None


def test_none_shows_messages_only() -> None:
    stream = Terminal()
    display = open_progress("none", stream)
    display.write("hello")
    display.update(snapshot(1e9))
    display.close()
    assert stream.getvalue() == "hello\n"


def test_the_bar_is_redrawn_at_intervals_and_ends_with_the_last_state() -> None:
    stream = Terminal()
    display = open_progress("auto", stream)
    for thousandth in range(1000):
        display.update(snapshot(thousandth / 1000, rows_done=thousandth))
    display.close()
    drawn = [line for line in stream.getvalue().split("\r") if "rows" in line]
    rows = [line.partition(" rows")[0].split()[-1] for line in drawn]
    assert list(dict.fromkeys(rows)) == [
        "0/1,000",
        "250/1,000",
        "500/1,000",
        "750/1,000",
        "999/1,000",
    ]
    assert drawn[0].startswith("  0% |")
    assert "999/1,000 rows, 3 failed, ETA 05:12" in drawn[-1]
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize("rows_total", [None, 1000])
def test_the_bar_fits_a_narrow_terminal(rows_total: int | None) -> None:
    stream = Terminal(columns=40)
    display = open_progress("auto", stream)
    display.update(snapshot(1.0, rows_total=rows_total))
    display.close()
    widths = {len(line) for line in stream.getvalue().replace("\n", "\r").split("\r")}
    assert 30 <= max(widths) <= 40


def test_a_message_does_not_break_the_bar() -> None:
    stream = Terminal()
    display = open_progress("auto", stream)
    display.update(snapshot(1.0))
    display.write("a message")
    display.close()
    assert "\ra message\n" in stream.getvalue()


@pytest.mark.parametrize("name", ["auto", "plain", "json"])
def test_a_closed_stream_silences_the_display_and_nothing_else(name: Any) -> None:
    stream = ClosedPipe()
    display = open_progress(name, stream)
    for second in range(0, 300, 31):
        display.update(snapshot(float(second)))
    display.write("message")
    display.close()
    assert stream.attempts == 1
