"""Where a running job stands, for whoever watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cbatch_cli.data.sources import Source
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.job_rows import JobRows
from cbatch_cli.job_writer import RowCounts
from cbatch_cli.metrics import RunSnapshot

OnProgress = Callable[[RunSnapshot], None]

INTERVAL_S = 0.5


class JobProgress:
    """Puts a snapshot together from what the job's threads count; may be asked from any thread."""

    def __init__(
        self,
        *,
        source: Source,
        rows: JobRows,
        counts: RowCounts,
        stats: EngineStats,
        started_at: float,
    ) -> None:
        self._source = source
        self._rows = rows
        self._counts = counts
        self._stats = stats
        self._started_at = started_at

    def snapshot(self) -> RunSnapshot:
        """Where the job stands now."""
        counts, stats = self._counts, self._stats
        elapsed_s = time.monotonic() - self._started_at
        num_rows = self._source.num_rows
        rows_total = None if num_rows is None else self._rows.num_own(num_rows)
        return RunSnapshot(
            elapsed_s=elapsed_s,
            rows_done=counts.num_done,
            rows_failed=counts.num_failed,
            rows_total=rows_total,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            prompt_tokens=stats.num_prompt_tokens,
            output_tokens=stats.num_output_tokens,
            eta_s=self._eta(elapsed_s, counts.num_done),
        )

    def _eta(self, elapsed_s: float, num_done: int) -> float | None:
        """Seconds left: the tokens that remain at the rate of those computed so far.

        Rows that are done say how many tokens a row takes; the share of the input that is read
        says how many rows remain.
        """
        stats = self._stats
        fraction = self._source.fraction_read
        num_answered = num_done - self._counts.num_resumed
        if num_answered <= 0 or not fraction:
            return None
        tokens_done = stats.num_prompt_tokens + stats.num_output_tokens
        num_rows = self._rows.num_own(
            self._source.num_rows or round(self._rows.num_read / fraction)
        )
        tokens_total = tokens_done / num_answered * (num_rows - self._counts.num_resumed)
        tokens_computed = max(stats.num_computed_tokens + stats.num_cached_tokens, 1)
        return max(0.0, tokens_total - tokens_computed) * elapsed_s / tokens_computed


class Ticking:
    """While its block runs, hands a snapshot to `on_progress` twice a second, and one at the end.

    Does nothing if `on_progress` is None.
    """

    def __init__(self, on_progress: OnProgress | None, snapshot: Callable[[], RunSnapshot]) -> None:
        self._on_progress = on_progress
        self._snapshot = snapshot
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="cbatch-progress", daemon=True)

    def __enter__(self) -> None:
        if self._on_progress is not None:
            self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._on_progress is not None:
            self._done.set()
            self._thread.join()
            self._on_progress(self._snapshot())

    def _tick(self) -> None:
        assert self._on_progress is not None
        while not self._done.wait(INTERVAL_S):
            self._on_progress(self._snapshot())
