"""Failed rows: tried again when told, and when there are too many of them the run stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch_cli.errors import RunInterruptedError, TooManyErrorsError
from tests.resuming import NUM_ROWS, WatchedRun, content, metrics, rows_of, write_jsonl

FAILING = (3, 17, 18, 40, 59)


@pytest.fixture(params=["out.parquet", "out/"], ids=["file", "folder"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/{request.param}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", rows_of())


def errors_of(output: str) -> list[int]:
    return [row["row_index"] for row in content(Path(output)) if row["error"] is not None]


def test_failed_rows_stay_failed_unless_told(source: Path, output: str) -> None:
    summary = WatchedRun(failing=FAILING)(source, output)
    assert summary["rows_failed"] == len(FAILING) and summary["errors"] == {"engine_error": 5}
    run = WatchedRun()
    assert run(source, output)["rows_failed"] == len(FAILING)
    assert run.num_loads == 0 and errors_of(output) == list(FAILING)


def test_failed_rows_of_a_done_job_are_tried_again(source: Path, output: str) -> None:
    WatchedRun()(source, source.with_name("whole.parquet"))
    WatchedRun(failing=FAILING)(source, output)
    before = metrics(Path(output))
    run = WatchedRun(failing=[17])
    summary = run(source, output, retry_errors=True)

    assert sorted(run.finished) == list(FAILING)
    assert summary["rows_ok"] == NUM_ROWS - 1 and summary["errors"] == {"engine_error": 1}
    assert errors_of(output) == [17]
    after = metrics(Path(output))
    for row in range(NUM_ROWS):
        assert (before[row] == after[row]) == (row not in FAILING)
    last = WatchedRun()
    assert last(source, output, retry_errors=True)["rows_failed"] == 0
    assert sorted(last.finished) == [17]
    assert content(Path(output)) == content(source.with_name("whole.parquet"))
    again = WatchedRun()
    again(source, output, retry_errors=True)
    assert again.num_loads == 0


def test_failed_rows_of_an_interrupted_job_are_tried_again(source: Path, output: str) -> None:
    WatchedRun()(source, source.with_name("whole.parquet"))
    first = WatchedRun(stop_at_step=38, failing=FAILING)
    with pytest.raises(RunInterruptedError):
        first(source, output)
    failed = set(FAILING) & first.finished.keys()
    assert 3 in failed and 59 not in failed
    run = WatchedRun()
    run(source, output, retry_errors=True)
    assert run.finished.keys() & first.finished.keys() == failed
    assert content(Path(output)) == content(source.with_name("whole.parquet"))


def test_trying_again_can_be_interrupted(source: Path, output: str) -> None:
    WatchedRun()(source, source.with_name("whole.parquet"))
    WatchedRun(failing=range(10, 50))(source, output)
    first = WatchedRun(stop_at_step=15)
    with pytest.raises(RunInterruptedError):
        first(source, output, retry_errors=True)
    if not output.endswith("/"):
        assert errors_of(output) == list(range(10, 50)), "the old answers stay until the new"
    assert first.finished and first.finished.keys() < set(range(10, 50))
    run = WatchedRun()
    run(source, output)
    assert run.finished.keys() | first.finished.keys() == set(range(10, 50))
    assert not run.finished.keys() & first.finished.keys()
    assert content(Path(output)) == content(source.with_name("whole.parquet"))


def test_an_answer_is_never_given_up_for_an_error(source: Path, output: str) -> None:
    first = WatchedRun(stop_at_step=30)
    with pytest.raises(RunInterruptedError):
        first(source, output)
    run = WatchedRun(failing=range(NUM_ROWS))
    run(source, output, retry_errors=True, max_errors="100%")
    assert set(errors_of(output)) == set(range(NUM_ROWS)) - first.finished.keys()


def test_the_first_failed_row_may_end_the_run(source: Path, output: str) -> None:
    first = WatchedRun(failing=[11])
    with pytest.raises(TooManyErrorsError, match="engine_error: out of luck") as caught:
        first(source, output, on_error="fail")
    assert caught.value.exit_code == 8
    with pytest.raises(TooManyErrorsError):
        WatchedRun()(source, output, on_error="fail")
    run = WatchedRun()
    summary = run(source, output, on_error="record")
    assert summary["errors"] == {"engine_error": 1} and errors_of(output) == [11]
    assert 0 < summary["rows_resumed"] < NUM_ROWS
    assert 11 not in run.finished


def test_so_many_rows_may_fail(source: Path, output: str) -> None:
    with pytest.raises(TooManyErrorsError, match="4 rows failed"):
        WatchedRun(failing=range(20, 40))(source, output, max_errors="3")
    run = WatchedRun(failing=range(20, 40))
    assert run(source, output, max_errors="20")["rows_failed"] == 20
    assert len(run.finished) < NUM_ROWS


def bad_rows(folder: Path, is_bad: Any, *, num_rows: int = 400) -> Path:
    source = folder / "bad.jsonl"
    lines = ["oops" if is_bad(i) else json.dumps({"prompt": f"p{i}"}) for i in range(num_rows)]
    source.write_text("\n".join(lines))
    return source


def test_such_a_share_of_rows_may_fail(tmp_path: Path, output: str) -> None:
    source = bad_rows(tmp_path, lambda row: row % 10 == 0)
    with pytest.raises(TooManyErrorsError, match="share"):
        WatchedRun()(source, output, max_errors="9%")
    summary = WatchedRun()(source, output, max_errors="25%")
    assert summary["rows_failed"] == 40 and summary["rows_resumed"] >= 10


def test_a_share_of_a_short_input_is_checked_at_its_end(tmp_path: Path, output: str) -> None:
    source = bad_rows(tmp_path, lambda row: row % 4 == 0, num_rows=40)
    with pytest.raises(TooManyErrorsError, match="10 of 40 rows failed.*10 invalid_json") as caught:
        WatchedRun()(source, output, max_errors="24%")
    assert caught.value.exit_code == 8
    run = WatchedRun()
    summary = run(source, output, max_errors="25%")
    assert summary["rows_failed"] == 10 and summary["rows_resumed"] == 40 and not run.finished


def test_a_run_whose_first_rows_all_fail_stops(tmp_path: Path, output: str) -> None:
    source = bad_rows(tmp_path, lambda row: row < 399)
    with pytest.raises(TooManyErrorsError, match="first 100 rows all failed"):
        WatchedRun()(source, output, rows_per_part=30)
    run = WatchedRun()
    summary = run(source, output, rows_per_part=30, max_errors="100%")
    assert (summary["rows_failed"], summary["rows_ok"]) == (399, 1)
    assert summary["rows_resumed"] >= 100
    ninety_nine = bad_rows(tmp_path, lambda row: row < 99)
    assert WatchedRun()(ninety_nine, tmp_path / "other.parquet")["rows_failed"] == 99


def test_a_run_that_is_to_stop_does_not_read_on(tmp_path: Path, output: str) -> None:
    source = bad_rows(tmp_path, lambda row: row > 0, num_rows=200_000)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        from cbatch_cli.job_rows import JobRows

        to_run = JobRows.to_run

        def watched(self: JobRows, settle: Any) -> Any:
            for entry in to_run(self, settle):
                read.append(entry.row.index)
                yield entry

        patch.setattr(JobRows, "to_run", watched)
        with pytest.raises(TooManyErrorsError):
            WatchedRun()(source, output, max_errors="50")
    assert len(read) < 10_000
