"""The last stage of a job: finished rows to text and Parquet, on a thread of its own."""

from __future__ import annotations

import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cbatch_cli.data.journal import Journal
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import RowError
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason, Request, RequestOutput

_ROWS_AHEAD = 1024
"""Finished rows that may wait for the writer before whoever finishes more has to wait too."""


class Answer(NamedTuple):
    """What the engine made of a row."""

    request: Request
    output: RequestOutput


class FinishedRow(NamedTuple):
    """A row at its end: answered, kept from the engine by an error, or settled by a past run."""

    row: Row
    outcome: Answer | RowError | RowResult


@dataclass(slots=True)
class RowCounts:
    """How many rows have ended, and how."""

    num_ok: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    """Rows that earlier runs settled, among the others."""

    def add(self, error: RowError | None) -> None:
        """Count one row."""
        if error is None:
            self.num_ok += 1
        else:
            self.errors[error.type.value] += 1

    @property
    def num_failed(self) -> int:
        """Rows that ended with an error."""
        return self.errors.total()

    @property
    def num_done(self) -> int:
        """Rows that have ended."""
        return self.num_ok + self.num_failed


class JobWriter:
    """Turns finished rows into results, stores and writes them, in the order of `put`.

    `finalize` makes the text of an answer, `journal` keeps it, `write` puts it into the output and
    `guard` may end the run. After a failure rows are taken and dropped, so that nobody blocks on
    `put`; `error` says what happened and `close` raises it.
    """

    def __init__(
        self,
        *,
        finalize: Callable[[Request, RequestOutput], RequestOutput],
        journal: Journal,
        write: Callable[[Row, RowResult], None],
        guard: Callable[[int, RowCounts, RowError | None], None],
        counts: RowCounts,
        return_token_ids: bool,
    ) -> None:
        self._finalize = finalize
        self._journal = journal
        self._write = write
        self._guard = guard
        self._return_token_ids = return_token_ids
        self._worker = socket.gethostname()
        self._queue: queue.Queue[FinishedRow | None] = queue.Queue(_ROWS_AHEAD)
        self._thread = threading.Thread(target=self._work, name="cbatch-writer", daemon=True)
        self.counts = counts
        self.error: BaseException | None = None
        self._thread.start()

    def put(self, row: Row, outcome: Answer | RowError | RowResult) -> None:
        """Hand over a finished row; waits while too many are on their way."""
        self._queue.put(FinishedRow(row, outcome))

    def close(self) -> None:
        """Wait until every row is written. Raises what writing raised."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        while (finished := self._queue.get()) is not None:
            if self.error is not None:
                continue
            try:
                self._store(*finished)
            except BaseException as error:
                self.error = error

    def _store(self, row: Row, outcome: Answer | RowError | RowResult) -> None:
        if isinstance(outcome, RowResult):
            result = outcome
            self.counts.num_resumed += 1
        else:
            result = self._result(row, outcome)
            self._journal.append_result(row.index, row.content_hash, result)
        self._write(row, result)
        self.counts.add(result.error)
        self._guard(row.index, self.counts, result.error)

    def _result(self, row: Row, outcome: Answer | RowError) -> RowResult:
        if isinstance(outcome, RowError):
            return RowResult(
                row_index=row.index,
                completion=None,
                finish_reason=FinishReason.ERROR,
                error=outcome,
                metrics=RequestMetrics(worker=self._worker),
            )
        output = self._finalize(*outcome)
        return RowResult(
            row_index=row.index,
            completion=output.text,
            finish_reason=output.finish_reason,
            error=output.error,
            metrics=replace(output.metrics, worker=self._worker),
            token_ids=output.token_ids if self._return_token_ids else None,
        )
