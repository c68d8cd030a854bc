"""Limits on failed rows, which stop a run that goes wrong."""

from __future__ import annotations

from collections.abc import Iterable

from cbatch_cli.config import JobConfig, parse_max_errors
from cbatch_cli.data.part_info import PartInfo
from cbatch_cli.errors import RowError, TooManyErrorsError
from cbatch_cli.job_writer import RowCounts
from cbatch_cli.shard import WHOLE, Shard

FIRST_ROWS = 100
"""If the first so many rows all fail, it is a wrong column, not bad data; a share of failed rows
means little before."""


class ErrorGuard:
    """Called with every row that ends; raises `TooManyErrorsError` when the run is to stop.

    A row that fails without being run ends long before the rows that came before it, so what
    counts is where a row is in the input: a share is one of the rows up to the last that ended.

    `parts` hold the rows that earlier runs have settled, and `shard` is that of the job.
    """

    def __init__(
        self, config: JobConfig, *, shard: Shard = WHOLE, parts: Iterable[PartInfo] = ()
    ) -> None:
        self._fail_at_once = config.on_error == "fail"
        self._max_errors, self._max_share = parse_max_errors(config.max_errors)
        self._has_limit = config.max_errors is not None
        self._shard = shard
        self._rows_per_part = config.rows_per_part
        self._num_first_failed = 0
        self._num_reached = 0
        for part in parts:
            self._num_reached = max(self._num_reached, self._place(part.rows.stop))
            if sum(part.errors.values()) == len(part.rows):
                self._num_first_failed += sum(self._place(i) < FIRST_ROWS for i in part.rows)

    def __call__(self, row_index: int, counts: RowCounts, error: RowError | None) -> None:
        """`error` is that of the row that has just ended, which `counts` holds already."""
        place = self._place(row_index)
        self._num_reached = max(self._num_reached, place + 1)
        if error is None:
            return
        last = f"the last was {error.type.value}: {error.message}"
        if self._fail_at_once:
            raise TooManyErrorsError(f"a row failed with {error.type.value}: {error.message}")
        failed, reached = counts.num_failed, self._num_reached
        if self._max_errors is not None and failed > self._max_errors:
            raise TooManyErrorsError(f"{failed} rows failed, more than --max-errors allows; {last}")
        if reached >= FIRST_ROWS:
            self._check_share(failed, reached, last)
        self._num_first_failed += place < FIRST_ROWS
        if not self._has_limit and self._num_first_failed == FIRST_ROWS and place < FIRST_ROWS:
            raise TooManyErrorsError(
                f"the first {FIRST_ROWS} rows all failed; {last}. Is it the right column? "
                "(--max-errors sets another limit)"
            )

    def at_end(self, counts: RowCounts) -> None:
        """Check the share of an input that was too short to have one before it ended."""
        errors = ", ".join(f"{count} {name}" for name, count in counts.errors.most_common())
        self._check_share(counts.num_failed, counts.num_done, errors)

    def _check_share(self, failed: int, reached: int, errors: str) -> None:
        if self._max_share is not None and failed > self._max_share * reached:
            raise TooManyErrorsError(
                f"{failed} of {reached} rows failed, a larger share than --max-errors allows; "
                f"{errors}"
            )

    def _place(self, row_index: int) -> int:
        """How many rows of the job come before a row of the input."""
        return self._shard.num_rows(row_index, self._rows_per_part)
