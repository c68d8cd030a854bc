"""The end of a run, for people."""

from __future__ import annotations

from typing import Any

from cbatch_cli.summary import summary_text

SUMMARY: dict[str, Any] = {
    "output": "a.parquet",
    "rows": 1200,
    "rows_ok": 1199,
    "rows_failed": 1,
    "errors": {"timeout": 1},
    "prompt_tokens": 5000,
    "output_tokens": 300,
    "output_tokens_per_s": 12.34,
    "total_tokens_per_s": 2000.0,
    "wall_s": 3.21,
    "load_s": 1.5,
}


def test_what_a_run_came_to() -> None:
    assert summary_text(SUMMARY).splitlines() == [
        "answers  a.parquet",
        "rows     1,200: 1,199 ok, 1 failed (1 timeout)",
        "tokens   5,000 in, 300 out",
        "speed    12.3 tokens/s out, 2,000.0 in and out",
        "time     3.2 s, and 1.5 s to load the model",
    ]


def test_times_of_an_earlier_run_are_said_to_be_its() -> None:
    lines = summary_text({**SUMMARY, "already_done": True}).splitlines()
    marked = [line.endswith(", in the run that made them") for line in lines]
    assert marked == [False, False, False, True, True]
