"""Limits on failed rows, which stop a run that goes wrong."""

from __future__ import annotations

from cbatch_cli.config import JobConfig, parse_max_errors
from cbatch_cli.errors import RowError, TooManyErrorsError
from cbatch_cli.job_writer import RowCounts

FIRST_ROWS = 100
"""If so many rows end and all have failed, it is a wrong column, not bad data; a share of failed
rows means little before."""


class ErrorGuard:
    """Called with every row that ends; raises `TooManyErrorsError` when the run is to stop."""

    def __init__(self, config: JobConfig) -> None:
        self._fail_at_once = config.on_error == "fail"
        self._max_errors, self._max_share = parse_max_errors(config.max_errors)
        self._has_limit = config.max_errors is not None

    def __call__(self, counts: RowCounts, error: RowError | None) -> None:
        """`error` is that of the row that has just ended, which `counts` holds already."""
        if error is None:
            return
        last = f"the last was {error.type.value}: {error.message}"
        if self._fail_at_once:
            raise TooManyErrorsError(f"a row failed with {error.type.value}: {error.message}")
        failed, done = counts.num_failed, counts.num_done
        if self._max_errors is not None and failed > self._max_errors:
            raise TooManyErrorsError(f"{failed} rows failed, more than --max-errors allows; {last}")
        if self._max_share is not None and done >= FIRST_ROWS and failed > self._max_share * done:
            raise TooManyErrorsError(
                f"{failed} of {done} rows failed, a larger share than --max-errors allows; {last}"
            )
        if not self._has_limit and done == failed == FIRST_ROWS:
            raise TooManyErrorsError(
                f"the first {FIRST_ROWS} rows all failed; {last}. Is it the right column? "
                "(--max-errors sets another limit)"
            )
