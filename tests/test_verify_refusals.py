"""`cbatch verify`: what is not as the run wrote it, or is not of the run, is refused and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.cli import main
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.errors import UsageError
from cbatch_cli.merge import merge_shards
from cbatch_cli.verify import verify_output
from cbatch_cli.verify_result import verify_text
from tests.null_engine import NULL_LOADER
from tests.tiny_models import tiny_llama
from tests.verifying import rewrite, rewrite_table, rows_of, run, verify


@pytest.mark.parametrize("left", [0, 3])
def test_rows_that_are_lost(tmp_path: Path, left: int) -> None:
    path = run(tmp_path, rows_of(4))
    rewrite_table(path, lambda table: table.slice(0, left))
    message = f"out.parquet holds {left} rows, and the run that wrote it had 4"
    with pytest.raises(UsageError, match=message):
        verify(path)
    assert main(["verify", str(path)]) == 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 3, 2, 4, 5], "where row 2 should be is row 3"),
        ([0, 1, 1, 3, 4, 5], "where row 2 should be is row 1"),
        ([1, 2, 3, 4, 5, 6], "where row 0 should be is row 1"),
    ],
)
def test_rows_in_another_order_twice_or_with_a_gap(
    tmp_path: Path, order: list[int], message: str
) -> None:
    path = run(tmp_path, rows_of(7), limit=6)
    assert verify(path)["rows_equal"] == 6
    table = pq.read_table(path)
    number = table.column_names.index("row_index")
    added = table.slice(5).set_column(number, "row_index", pa.array([6]))
    rows = pa.concat_tables([table, added])
    rewrite_table(path, lambda _: rows.take(order))
    with pytest.raises(UsageError, match=message):
        verify(path)


def test_parts_of_a_folder_that_are_lost_or_changed(tmp_path: Path) -> None:
    folder = run(tmp_path, rows_of(10), output="out/")
    assert verify(folder)["rows_equal"] == 10
    part = folder / "part-00001.parquet"
    kept = part.read_bytes()
    rewrite_table(part, lambda table: table.take([1, 0, 2, 3]))
    with pytest.raises(UsageError, match="part-00001.parquet .* row 4 should be is row 5"):
        verify(folder)
    rewrite_table(part, lambda table: table.drop_columns(["metrics"]))
    with pytest.raises(UsageError, match=r"part-00001.parquet has no column 'metrics'"):
        verify(folder)
    part.unlink()
    with pytest.raises(UsageError, match="out holds 6 rows, and the run that wrote it had 10"):
        verify(folder)
    part.write_bytes(kept)
    (folder / "part-00002.parquet").unlink()
    with pytest.raises(UsageError, match="does not tell of a finished run"):
        verify(folder)


def test_rows_of_a_shard(tmp_path: Path) -> None:
    for index in range(2):
        run(tmp_path, rows_of(14), shard=f"{index}/2")
    shard = tmp_path / "out.shard-00001-of-00002.parquet"
    found = pq.read_table(shard).column("row_index").to_pylist()
    assert found == [4, 5, 6, 7, 12, 13] and verify(shard)["rows_equal"] == 6
    whole = Path(
        merge_shards(f"{tmp_path}/out.parquet", overwrite=False, remove_shards=False)["output"]
    )
    assert verify(whole)["rows_equal"] == 14
    identity = read_note(whole, METADATA_KEY)["identity"]
    assert identity == read_note(shard, METADATA_KEY)["identity"]
    assert identity["model"] == "null gemma-3-270m"
    rewrite(shard, "row_index", lambda rows: list(range(6)))
    with pytest.raises(UsageError, match="where row 4 should be is row 0"):
        verify(shard)


def test_what_a_resumed_run_wrote_is_whole(tmp_path: Path) -> None:
    rows = [*rows_of(6), "no json", *rows_of(3)]
    folder = run(tmp_path, rows, output="out/")
    run(tmp_path, rows, output="out/", retry_errors=True)
    found = verify(folder)
    assert (found["rows"], found["rows_failed"], found["rows_equal"]) == (10, 1, 9)


def test_errors_that_are_lost(tmp_path: Path) -> None:
    path = run(tmp_path, [*rows_of(3), "no json"])
    rewrite(path, "error", lambda errors: [None for _ in errors])
    with pytest.raises(UsageError, match="row 3 of .* has neither an answer nor an error"):
        verify(path)
    rewrite(path, "completion", lambda texts: [text or "made up" for text in texts])
    with pytest.raises(UsageError, match="holds 0 rows with an error, and the run .* had 1"):
        verify(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("completion", None, "row 1 of .* has neither an answer nor an error"),
        ("finish_reason", None, "row 1 of .* holds what no run writes: None is not a valid"),
        ("finish_reason", "made up", "row 1 of .* 'made up' is not a valid FinishReason"),
        ("metrics", None, "row 1 of .* holds what no run writes"),
        ("token_ids", None, "row 1 of .* has an answer and no token_ids"),
        ("row_index", None, "where row 1 should be is row None"),
    ],
)
def test_values_that_no_run_writes(
    tmp_path: Path, column: str, value: str | None, message: str
) -> None:
    path = run(tmp_path, rows_of(3), return_token_ids=True)
    rewrite(path, column, lambda values: [values[0], value, values[2]])
    with pytest.raises(UsageError, match=message):
        verify(path)
    assert main(["verify", str(path)]) == 2


def test_an_error_beside_an_answer(tmp_path: Path) -> None:
    path = run(tmp_path, [*rows_of(2), "no json"])
    rewrite(path, "error", lambda errors: [errors[2], *errors[1:]])
    with pytest.raises(UsageError, match="row 0 of .* has both an answer and an error"):
        verify(path)


OWN = ["row_index", "completion", "finish_reason", "error", "metrics", "token_ids"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_column_of_ours_that_is_missing(tmp_path: Path, name: str, is_taken: bool) -> None:
    # Columns of the input with our names give ours a prefix, and stand directly before them.
    taken = {own: 7 if own == "row_index" else "theirs" for own in OWN} if is_taken else {}
    rows = [{"prompt": f"p{i}", **taken, "last": i} for i in range(3)]
    path = run(tmp_path, rows, return_token_ids=True)
    assert verify(path)["rows_equal"] == 3
    name = f"cbatch_{name}" if is_taken else name
    kept = path.read_bytes()
    rewrite_table(path, lambda table: table.drop_columns([name]))
    with pytest.raises(UsageError, match=f"has no column '{name}' behind"):
        verify(path)
    path.write_bytes(kept)
    rewrite_table(path, lambda table: table.rename_columns({name: "renamed"}))
    assert main(["verify", str(path)]) == 2
    path.write_bytes(kept)
    rewrite_table(
        path,
        lambda table: table.set_column(
            table.column_names.index(name), name, pa.nulls(table.num_rows, pa.date32())
        ),
    )
    with pytest.raises(UsageError, match=f"has a column '{name}' of type date32.*, not "):
        verify(path)


def test_a_prefix_that_no_column_of_the_input_gives(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(3))
    rewrite_table(path, lambda t: t.rename_columns({"completion": "cbatch_completion"}))
    with pytest.raises(UsageError, match="has no column 'completion', but 'cbatch_completion'"):
        verify(path)


def test_columns_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path, rows_of(3))
    rewrite_table(path, lambda table: table.select(table.column_names[::-1]))
    assert main(["verify", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"cbatch: error: {path} has its columns in another order than the run wrote them\n"
    )
    rewrite_table(path, lambda table: table.select(table.column_names[::-1]))
    assert verify(path)["rows_equal"] == 3
    names = pq.read_schema(path).names
    rewrite_table(path, lambda table: table.select(["completion", *names[:-4], *names[-3:]]))
    with pytest.raises(UsageError, match="has no column '.*completion' behind those of the input"):
        verify(path)


def test_another_model_is_refused_or_if_it_was_named_told(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(3))
    changed = dataclasses.replace(NULL_LOADER, identify=lambda model: "other")
    sentence = f"{path} was made by gemma-3-270m at null gemma-3-270m, and gemma-3-270m is at other"
    with pytest.raises(UsageError, match=f"{sentence}; name a model with -m"):
        verify_output(str(path), loader=changed)
    lines: list[str] = []
    found = verify_output(
        str(path), loader=changed, changes={"model": "gemma-3-270m"}, log=lines.append
    )
    assert lines[0] == f"warning: {sentence}" and found["warnings"] == [sentence]
    assert found["model"] == "gemma-3-270m" and found["rows_equal"] == 3
    moved = dataclasses.replace(NULL_LOADER, identify=lambda model: "null gemma-3-270m")
    found = verify_output(str(path), loader=moved, changes={"model": "/elsewhere"})
    assert (found["model"], found["warnings"]) == ("/elsewhere", [])


@pytest.mark.parametrize("with_ids", [False, True])
def test_another_text_or_finish_reason_differs(tmp_path: Path, with_ids: bool) -> None:
    path = run(tmp_path, rows_of(3), return_token_ids=with_ids)
    rewrite(path, "finish_reason", lambda _: ["length", "stop", "length"])
    found = verify(path)
    assert found["differences"] == [
        {
            "row_index": 1,
            "field": "finish_reason",
            "position": 0,
            "was": "stop",
            "now": "length",
        }
    ]
    assert "row 1 has the finish_reason 'stop' in the output, 'length' now" in verify_text(found)
    rewrite(path, "completion", lambda texts: [texts[0], texts[1][:4], texts[2]])
    (difference,) = verify(path)["differences"]
    assert (difference["field"], difference["position"]) == ("completion", 4)
    assert "differs from character 4 on: the end in the output" in verify_text(verify(path))


def test_quiet_prints_errors_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path, [{"prompt": ""}])
    arguments = ["verify", str(path), "-m", str(tiny_llama(tmp_path / "model")), "-q"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*arguments, "--json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["rows_compared"] == 0 and "gemma-3-270m at null" in found["warnings"][0]


def test_a_name_that_no_output_has(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "status", "merge"):
        assert main([command, "prompts.jsonl"]) == 2
        assert "prompts.jsonl names neither a .parquet file nor a folder, so it is no output" in (
            capsys.readouterr().err
        )


def unchanged(table: pa.Table) -> pa.Table:
    """The same table."""
    return table


@pytest.mark.parametrize("change", [unchanged, pa.Table.combine_chunks])
def test_a_file_that_was_written_again_is_whole(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table]
) -> None:
    path = run(tmp_path, [*rows_of(9), "no json"])
    rewrite_table(path, change)
    assert verify(path)["rows_equal"] == 9
