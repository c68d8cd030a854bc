"""Showing where a run stands, on stderr: a bar on a terminal, plain or JSON lines elsewhere.

Drawing never ends a run: once the stream fails, the display goes silent.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TextIO

import orjson
from tqdm import tqdm

from cbatch_cli.config import ProgressName
from cbatch_cli.metrics import RunSnapshot
from cbatch_cli.summary import summary_text

RATE_WINDOW_S = 15.0


class Rates(NamedTuple):
    """Tokens per second over the recent past."""

    prompt: float
    output: float


class RecentRates:
    """Token rates over the last `window_s` seconds of a run."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        # A run begins with nothing computed, which makes the first rates right.
        self._samples = deque([(0.0, 0, 0)])

    def add(self, snapshot: RunSnapshot) -> Rates:
        """Take a snapshot in, no older than the one before, and return the rates up to it."""
        newest = (snapshot.elapsed_s, snapshot.prompt_tokens, snapshot.output_tokens)
        self._samples.append(newest)
        # The oldest sample kept is the last one outside the window, so that it is always covered.
        while len(self._samples) > 2 and self._samples[1][0] <= newest[0] - self._window_s:
            self._samples.popleft()
        oldest = self._samples[0]
        seconds = newest[0] - oldest[0]
        if seconds <= 0.0:
            return Rates(0.0, 0.0)
        return Rates((newest[1] - oldest[1]) / seconds, (newest[2] - oldest[2]) / seconds)


def rows_text(snapshot: RunSnapshot) -> str:
    """How many rows are done, of how many where that is known, and how many failed."""
    total = "" if snapshot.rows_total is None else f"/{snapshot.rows_total:,}"
    failed = f", {snapshot.rows_failed:,} failed" if snapshot.rows_failed else ""
    return f"{snapshot.rows_done:,}{total} rows{failed}"


def status_text(snapshot: RunSnapshot, rates: Rates) -> str:
    """What a run does right now."""
    eta = "?" if snapshot.eta_s is None else tqdm.format_interval(snapshot.eta_s)
    return (
        f"ETA {eta}, {rates.prompt:,.0f} in {rates.output:,.0f} out tok/s, "
        f"{snapshot.num_running} run {snapshot.num_waiting} wait, "
        f"KV {snapshot.kv_cache_usage:.0%}"
    )


class Renderer(Protocol):
    """One way of showing a run on a stream."""

    def draw(self, snapshot: RunSnapshot, rates: Rates) -> None:
        """Show where the run stands."""

    def write(self, text: str) -> None:
        """Show a message beside it."""

    def close(self) -> None:
        """Leave the stream ready for other output."""

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Show what a finished run came to, after `close`."""


class TerminalBar:
    """A tqdm bar that is redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm[Any] | None = None

    def draw(self, snapshot: RunSnapshot, rates: Rates) -> None:
        """Redraw the bar; the first call makes it."""
        if self._bar is None:
            self._bar = tqdm(file=self._stream, dynamic_ncols=True, leave=True, bar_format="{desc}")
        # Older tqdm trims a line to the terminal only where the format has a bar, if an empty one.
        share = "{bar:0}" if snapshot.rows_total is None else "{percentage:3.0f}% |{bar:12}| "
        self._bar.total = snapshot.rows_total
        self._bar.n = snapshot.rows_done
        self._bar.bar_format = f"{share}{rows_text(snapshot)}, {status_text(snapshot, rates)}"
        self._bar.refresh()

    def write(self, text: str) -> None:
        """Print a message above the bar."""
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Print the summary below the bar."""
        self.write(summary_text(summary))


class PlainLines:
    """One line each time, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, snapshot: RunSnapshot, rates: Rates) -> None:
        """Print the state."""
        elapsed = tqdm.format_interval(snapshot.elapsed_s)
        self.write(f"[{elapsed}] {rows_text(snapshot)}, {status_text(snapshot, rates)}")

    def write(self, text: str) -> None:
        """Print a message."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Print the summary."""
        self.write(summary_text(summary))


class JsonLines:
    """One JSON object a line, for programs; `event` is `progress`, `message` or `summary`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, snapshot: RunSnapshot, rates: Rates) -> None:
        """Print the state: the fields of the snapshot and both rates in tokens per second."""
        self._print(
            event="progress",
            **dataclasses.asdict(snapshot),
            prompt_tokens_per_s=rates.prompt,
            output_tokens_per_s=rates.output,
        )

    def write(self, text: str) -> None:
        """Print a message."""
        self._print(event="message", text=text)

    def close(self) -> None:
        """Nothing is held."""

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Print the fields of the summary."""
        self._print(event="summary", **summary)

    def _print(self, **fields: Any) -> None:
        print(orjson.dumps(fields).decode(), file=self._stream, flush=True)


class ProgressDisplay:
    """Shows snapshots of a run at most once every `interval_s`. Used from one thread."""

    def __init__(self, renderer: Renderer, *, interval_s: float, draw_last: bool) -> None:
        self._renderer = renderer
        self._interval_s = interval_s
        self._draw_last = draw_last
        self._rates = RecentRates()
        self._next_draw_s = 0.0 if draw_last else interval_s
        self._undrawn: RunSnapshot | None = None
        self._broken = False

    def update(self, snapshot: RunSnapshot) -> None:
        """Take in where the run stands and draw it if it is time."""
        self._undrawn = snapshot
        if snapshot.elapsed_s >= self._next_draw_s:
            self._next_draw_s = snapshot.elapsed_s + self._interval_s
            self._draw()

    def write(self, text: str) -> None:
        """Show a message."""
        self._guarded(self._renderer.write, text)

    def close(self) -> None:
        """Draw what was not drawn yet, where the renderer shows the end, and let go."""
        if self._draw_last:
            self._draw()
        self._guarded(self._renderer.close)

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """Show what a finished run came to, after `close`."""
        self._guarded(self._renderer.show_summary, summary)

    def _draw(self) -> None:
        if self._undrawn is not None:
            snapshot, self._undrawn = self._undrawn, None
            self._guarded(self._renderer.draw, snapshot, self._rates.add(snapshot))

    def _guarded(self, action: Any, *arguments: Any) -> None:
        if self._broken:
            return
        try:
            action(*arguments)
        except OSError:  # the reader of our stderr is gone; the rows are worth more than the bar
            self._broken = True


def open_progress(name: ProgressName, stream: TextIO | None = None) -> ProgressDisplay:
    """The display that `--progress` names, on `stream` (stderr unless given).

    A bar is redrawn four times a second, JSON is printed every second, a plain line every 30.
    """
    stream = stream or sys.stderr
    if name == "json":
        return ProgressDisplay(JsonLines(stream), interval_s=1.0, draw_last=True)
    if name == "auto" and stream.isatty():
        return ProgressDisplay(TerminalBar(stream), interval_s=0.25, draw_last=True)
    interval_s = math.inf if name == "none" else 30.0
    return ProgressDisplay(PlainLines(stream), interval_s=interval_s, draw_last=False)
