"""The whole job through files, with an engine that needs no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cbatch_cli.config import build_job_config
from cbatch_cli.errors import CBatchError, UsageError
from cbatch_cli.job import run_job
from cbatch_cli.metrics import RunSnapshot
from tests.null_engine import NULL_LOADER, null_answer


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path, output: Path, **options: Any) -> dict[str, Any]:
    config = build_job_config({"inputs": (str(source),), "output": str(output), **options})
    return run_job(config, loader=NULL_LOADER)


def test_one_row_in_is_one_row_out_in_order(tmp_path: Path) -> None:
    rows = [{"id": i, "prompt": f"prompt {i}"} for i in range(500)]
    for row in rows[::3]:
        row["sampling_params"] = {"max_tokens": 1 + row["id"] % 11}
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    summary = run(source, tmp_path / "out.parquet", max_tokens=5, rows_per_part=64)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["row_index"] for row in table] == list(range(500))
    for given, row in zip(rows, table, strict=True):
        max_tokens = given.get("sampling_params", {}).get("max_tokens", 5)
        assert row["id"] == given["id"] and row["prompt"] == given["prompt"]
        assert row["completion"] == null_answer(given["id"], given["prompt"], max_tokens)
        assert row["finish_reason"] == "length" and row["error"] is None
        assert row["metrics"]["completion_tokens"] == max_tokens
    assert summary["rows"] == summary["rows_ok"] == 500 and summary["rows_failed"] == 0
    assert summary["output"] == str(tmp_path / "out.parquet")
    assert summary["output_tokens"] == sum(row["metrics"]["completion_tokens"] for row in table)


def test_bad_rows_are_rows_with_errors(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt": "good"}\nnot json\n{"prompt": ""}\n{"prompt": null}\n{"prompt": 5}\n'
        + json.dumps({"prompt": "x" * 5000})
        + '\n{"prompt": "a", "sampling_params": {"temperature": -1}}'
        + '\n{"prompt": "a", "sampling_params": {"beams": 4}}'
        + '\n{"prompt": "also good"}\n'
    )
    summary = run(source, tmp_path / "out.parquet", max_tokens=2)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    types = [row["error"] and row["error"]["type"] for row in table]
    assert types == [
        None,
        "invalid_json",
        "empty_prompt",
        "missing_prompt",
        "bad_type",
        "prompt_too_long",
        "invalid_option",
        "unsupported_option",
        None,
    ]
    for row in table:
        assert (row["completion"] is None) == (row["error"] is not None)
        assert (row["finish_reason"] == "error") == (row["error"] is not None)
    assert summary["rows_ok"] == 2 and summary["rows_failed"] == 7
    assert summary["errors"]["invalid_json"] == 1


def test_stop_strings_end_a_row_and_are_cut_off(tmp_path: Path) -> None:
    prompt = "tell me"
    answer = null_answer(0, prompt, 40)
    stop = answer[10:13]
    cut = answer.index(stop)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt}])
    run(source, tmp_path / "out.parquet", max_tokens=40, stop=[stop], return_token_ids=True)
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["completion"] == answer[:cut] and row["finish_reason"] == "stop_sequence"
    assert bytes(row["token_ids"]).decode() == answer[: cut + 3]
    assert row["metrics"]["completion_tokens"] == cut + 3


def test_the_metadata_says_how_the_run_was_made(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    run(source, tmp_path / "out.parquet", max_tokens=3, top_k=7, temperature=0.5)
    metadata = pq.read_metadata(tmp_path / "out.parquet").metadata[b"cbatch.run"]
    values = json.loads(metadata)
    assert values["resolved"]["sampling"]["top_k"] == 7
    assert values["config"]["max_tokens"] == 3
    assert values["totals"]["rows"] == 1


def test_progress_is_reported_and_ends_with_the_last_row(tmp_path: Path) -> None:
    snapshots: list[RunSnapshot] = []
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}] * 20)
    config = build_job_config({"inputs": (str(source),), "output": str(tmp_path / "o.parquet")})
    run_job(config, loader=NULL_LOADER, on_progress=snapshots.append)
    assert snapshots[-1].rows_done == 20


def test_an_input_that_breaks_in_the_middle_leaves_no_output(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    import gzip

    whole = gzip.compress(
        b"".join(json.dumps({"prompt": f"prompt {i} {i**9}"}).encode() + b"\n" for i in range(9999))
    )
    source.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(UsageError, match=r"in\.jsonl\.gz"):
        run(source, tmp_path / "out.parquet", max_tokens=1)
    assert not (tmp_path / "out.parquet").exists()


def test_a_failing_sink_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cbatch_cli.data.parquet_sink import ParquetSink

    def fail(self: ParquetSink, row: object, result: object) -> None:
        raise CBatchError("disk full")

    monkeypatch.setattr(ParquetSink, "add", fail)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}] * 5000)
    with pytest.raises(CBatchError, match="disk full"):
        run(source, tmp_path / "out.parquet", max_tokens=1)


@pytest.mark.parametrize(
    ("case", "options", "texts"),
    [
        ({"question": "why"}, {}, "why"),
        ({"instruction": "do", "input": "this"}, {}, "do\n\nthis"),
        ({"a": "x", "b": 2}, {"template": "{{ a }}-{{ b }}"}, "x-2"),
        ({"c": "col"}, {"prompt_column": "c"}, "col"),
        ({"prompt": "p"}, {"system": "be kind"}, "be kind\n\np"),
    ],
)
def test_prompts_are_made_from_columns(
    tmp_path: Path, case: dict[str, Any], options: dict[str, Any], texts: str
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [case])
    run(source, tmp_path / "out.parquet", max_tokens=4, **options)
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["metrics"]["prompt_tokens"] == len(texts)
    assert row["completion"] == null_answer(0, texts, 4)
