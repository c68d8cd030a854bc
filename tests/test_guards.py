"""When failed rows stop a run, whatever the order in which rows end."""

from __future__ import annotations

import random
from collections.abc import Iterable

from cbatch_cli.config import JobConfig
from cbatch_cli.data.part_info import PartInfo
from cbatch_cli.errors import RowError, RowErrorType, TooManyErrorsError
from cbatch_cli.guards import ErrorGuard
from cbatch_cli.job_writer import RowCounts
from cbatch_cli.shard import Shard

ERROR = RowError(RowErrorType.EMPTY_PROMPT, "the prompt is empty")


def end_rows(guard: ErrorGuard, rows: Iterable[int], failing: Iterable[int]) -> int | None:
    """End `rows` in this order; how many had ended when the guard stopped the run."""
    failing, counts = set(failing), RowCounts()
    for count, row in enumerate(rows, start=1):
        error = ERROR if row in failing else None
        counts.add(error)
        try:
            guard(row, counts, error)
        except TooManyErrorsError:
            return count
    return None


def config(**options: object) -> JobConfig:
    return JobConfig(inputs=("a",), **options)  # type: ignore[arg-type]


def test_the_first_rows_all_fail_in_any_order() -> None:
    for seed in range(20):
        rows = list(range(300))
        random.Random(seed).shuffle(rows)
        stopped = end_rows(ErrorGuard(config()), rows, range(100))
        assert stopped == max(rows.index(row) for row in range(100)) + 1
        assert end_rows(ErrorGuard(config()), rows, set(range(300)) - {seed}) is None


def test_a_first_row_that_takes_long_is_not_overtaken() -> None:
    rows = [*range(1, 300), 0]
    assert end_rows(ErrorGuard(config()), rows, range(1, 300)) is None
    assert end_rows(ErrorGuard(config()), rows, range(300)) == 300


def test_a_limit_takes_the_place_of_the_first_rows() -> None:
    assert end_rows(ErrorGuard(config(max_errors="250")), range(300), range(250)) is None
    assert end_rows(ErrorGuard(config(max_errors="249")), range(300), range(250)) == 250
    assert end_rows(ErrorGuard(config(max_errors="100%")), range(300), range(300)) is None


def test_a_share_is_one_of_the_rows_so_far_however_late_they_end() -> None:
    bad = range(0, 1000, 20)
    overtaking = sorted(range(1000), key=lambda row: (row if row in bad else row + 500, row))
    assert end_rows(ErrorGuard(config(max_errors="6%")), overtaking, bad) is None
    assert end_rows(ErrorGuard(config(max_errors="4%")), overtaking, bad) is not None
    assert end_rows(ErrorGuard(config(max_errors="4%")), range(1000), bad) == 101
    # A share means nothing among a few rows.
    assert end_rows(ErrorGuard(config(max_errors="4%")), range(99), range(99)) is None


def test_the_first_failure_may_be_the_last() -> None:
    assert end_rows(ErrorGuard(config(on_error="fail")), range(9), [5, 6]) == 6


def part(first: int, stop: int, num_failed: int) -> PartInfo:
    errors = {"empty_prompt": num_failed} if num_failed else {}
    return PartInfo(rows=range(first, stop), rows_hash="", end=None, errors=errors)


def test_rows_of_earlier_runs_count() -> None:
    failed = [part(0, 60, 60), part(60, 80, 20)]
    guard = ErrorGuard(config(rows_per_part=60), parts=failed)
    assert end_rows(guard, range(80, 200), range(80, 200)) == 20
    guard = ErrorGuard(config(rows_per_part=60), parts=[part(0, 60, 59)])
    assert end_rows(guard, range(60, 200), range(60, 200)) is None
    guard = ErrorGuard(config(max_errors="10%"), parts=[part(0, 1000, 0)])
    assert end_rows(guard, range(1000, 1100), range(1000, 1100)) is None


def test_the_first_rows_of_a_shard() -> None:
    shard = Shard(1, 3)
    rows = [row for row in range(900) if shard.owns(row // 10)]
    guard = ErrorGuard(config(rows_per_part=10), shard=shard)
    assert end_rows(guard, rows, rows) == 100
    guard = ErrorGuard(config(rows_per_part=10, max_errors="50%"), shard=shard)
    assert end_rows(guard, rows, rows[:150]) == 100
