"""`cbatch verify`: equal answers pass, one changed token is found, wherever the rows come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli import api
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.data.parquet_file import METADATA_KEY
from cbatch_cli.errors import UsageError
from cbatch_cli.merge import merge_shards
from cbatch_cli.verify import verify_output
from cbatch_cli.verify_result import verify_text
from tests.null_engine import NULL_LOADER, load_null_engine
from tests.tiny_models import tiny_llama
from tests.verifying import rewrite, rows_of, run, verify


def test_answers_that_are_equal(tmp_path: Path) -> None:
    path = run(tmp_path, [*rows_of(40), "no json", {"prompt": ""}], return_token_ids=True)
    found = verify(path)
    assert found == {
        "output": str(path),
        "rows": 42,
        "rows_failed": 2,
        "rows_compared": 16,
        "rows_equal": 16,
        "rows_different": 0,
        "compared": "token ids",
        "differences": [],
        "model": "gemma-3-270m",
        "warnings": [],
    }
    assert verify_text(found) == (
        f"{path}: token ids of 16 of 42 rows compared, 16 equal, 0 different; 2 rows with an "
        "error were left out\n"
    )


def test_one_changed_token_is_found(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(9), return_token_ids=True)
    was: list[int] = []

    def change(column: list[list[int]]) -> list[list[int]]:
        was.extend(column[5])
        column[5][3] += 1
        return column

    rewrite(path, "token_ids", change)
    found = verify(path, num_rows=9)
    assert (found["rows_equal"], found["rows_different"]) == (8, 1)
    assert found["differences"] == [
        {"row_index": 5, "field": "token_ids", "position": 3, "was": was[3] + 1, "now": was[3]}
    ]
    assert "row 5 differs from token 3 on" in verify_text(found)


@pytest.mark.parametrize("text", ["", "other"])
def test_texts_are_compared_where_no_ids_were_kept(tmp_path: Path, text: str) -> None:
    path = run(tmp_path, rows_of(3))
    assert verify(path)["compared"] == "texts"
    rewrite(path, "completion", lambda texts: [*texts[:2], texts[2][:2] + text])
    (difference,) = verify(path)["differences"]
    assert (difference["row_index"], difference["position"]) == (2, 2)
    assert difference["was"] == text and difference["now"]


def test_an_answer_that_fails_now_differs(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(2))

    def without_room(model: str, config: EngineConfig, log: Any) -> Any:
        engine = load_null_engine(model, config, log)
        runner = engine.client._runner.runner  # type: ignore[attr-defined]
        execute = runner.execute

        def failing(step: Any, stats: Any) -> Any:
            output = execute(step, stats)
            failed = {key: "the model's logits are not finite" for key in output.token_ids}
            return type(output)(step_id=output.step_id, token_ids={}, failed=failed)

        runner.execute = failing
        return engine

    loader = type(NULL_LOADER)(identify=NULL_LOADER.identify, load=without_room)
    found = verify_output(str(path), loader=loader)
    assert found["rows_different"] == 2
    assert "not finite" in found["differences"][0]["now"]


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_shards_and_what_they_are_merged_to(tmp_path: Path, output: str) -> None:
    for index in range(3):
        run(tmp_path, rows_of(30), output=output, shard=f"{index}/3", return_token_ids=True)
    suffix = "" if output.endswith("/") else ".parquet"
    shard = tmp_path / f"out.shard-00001-of-00003{suffix}"
    found = verify(shard, num_rows=100)
    assert found["rows_compared"] == found["rows_equal"] == found["rows"] == 10
    merge_shards(f"{tmp_path}/{output}", overwrite=False, remove_shards=True)
    found = verify(tmp_path / output, num_rows=100)
    assert found["rows_compared"] == found["rows_equal"] == found["rows"] == 30


def test_other_rows_are_drawn_by_another_seed_and_run_in_another_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(tmp_path, rows_of(200), temperature=1.0, seed=5, max_num_seqs=64)
    drawn: dict[int, list[int]] = {}
    settings: list[EngineConfig] = []
    for seed in (0, 0, 1):
        rows: list[int] = []

        def load(model: str, config: EngineConfig, log: Any, rows: list[int] = rows) -> Any:
            settings.append(config)
            engine = load_null_engine(model, config, log)
            generate = engine.client.generate

            def noting(requests: Any) -> Any:
                kept = list(requests)
                rows.extend(request.key.row for request in kept)
                return generate(iter(kept))

            monkeypatch.setattr(engine.client, "generate", noting)
            return engine

        loader = type(NULL_LOADER)(identify=NULL_LOADER.identify, load=load)
        assert verify_output(str(path), seed=seed, num_rows=20, loader=loader)["rows_equal"] == 20
        assert drawn.setdefault(seed, rows) == rows and rows != sorted(rows)
    assert len(set(drawn[0])) == 20 and set(drawn[0]) != set(drawn[1])
    assert max(drawn[0]) > 100 and min(drawn[0]) < 100
    assert settings[0].seed == 5 and settings[0].max_num_seqs == 3


def test_prompts_that_were_not_kept_come_from_the_input(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(12), columns="none")
    with pytest.raises(UsageError, match="does not hold the prompts, .*; name the input with --in"):
        verify(path)
    source = str(tmp_path / "in.jsonl")
    assert verify(path, inputs=(source,))["rows_equal"] == 12
    path = run(tmp_path, rows_of(12), columns="more", output="other.parquet")
    with pytest.raises(UsageError, match="no column is named .*; name the input with --input"):
        verify(path)
    path = run(tmp_path, rows_of(12), output="kept.parquet")
    (tmp_path / "in.jsonl").write_text('{"prompt": "p0"}\n')
    with pytest.raises(UsageError, match="has fewer rows than the output"):
        verify(path, inputs=(source,))


def test_another_prompt_is_no_difference_of_answers(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(4))
    rewrite(path, "prompt", lambda prompts: [f"longer {prompt}" for prompt in prompts])
    with pytest.raises(UsageError, match="had 2 tokens and has 9 now, so it is another prompt"):
        verify(path)
    rewrite(path, "prompt", lambda prompts: [None for _ in prompts])
    with pytest.raises(UsageError, match="cannot be made again: 'prompt' is missing or null"):
        verify(path)


def test_rows_keep_their_own_options_templates_and_values_that_had_no_place(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"q": f"q{i}", "deep": {"a": [1, {"b": i}]}, "sampling_params": {"max_tokens": i + 1}}
        for i in range(4)
    ]
    # A column whose type changes after the schema was fixed.
    rows += [{"q": "late", "deep": {"a": "text"}, "later": [1, 2], "sampling_params": None}]
    path = run(tmp_path, rows, template="{{ q }} {{ deep.a | tojson }}", return_token_ids=True)
    found = verify(path)
    assert found["rows_equal"] == found["rows"] == 5
    lengths = [len(ids) for ids in pq.read_table(path).column("token_ids").to_pylist()]
    assert lengths[:4] == [1, 2, 3, 4]
    # A column that a row lacks is null in the output, which is something else to a template.
    template = "{{ q }} {{ later | default('-') | tojson }}"
    path = run(tmp_path, rows, template=template, output="other.parquet")
    with pytest.raises(UsageError, match="name the input with --input"):
        verify(path)
    assert verify(path, inputs=(str(tmp_path / "in.jsonl"),))["rows_equal"] == 5


def test_what_is_no_finished_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="is not there, or not finished"):
        verify(tmp_path / "none.parquet")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(UsageError, match="does not tell of a finished run"):
        verify(tmp_path / "foreign.parquet")
    assert main(["verify", str(tmp_path / "foreign.parquet"), "--rows", "0"]) == 2
    assert "--rows must be at least 1" in capsys.readouterr().err


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(2))
    table = pq.read_table(path)
    note = json.loads(pq.read_metadata(path).metadata[METADATA_KEY.encode()])
    note["config"]["engine"]["speculation"] = True
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(note)}), path)
    with pytest.raises(UsageError, match="made by cbatch .* with 'speculation'"):
        verify(path)


def test_nothing_is_loaded_where_no_row_has_an_answer(tmp_path: Path) -> None:
    path = run(tmp_path, ["no json", '{"prompt": ""}'])
    loader = type(NULL_LOADER)(identify=NULL_LOADER.identify, load=lambda *_: pytest.fail("loaded"))
    found = verify_output(str(path), loader=loader)
    assert (found["rows_failed"], found["rows_compared"]) == (2, 0)


def test_a_real_model_and_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tiny_llama(tmp_path / "model"), tmp_path / "out.parquet"
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows_of(8)))
    api.run(
        str(source),
        model=str(folder),
        output=str(path),
        max_tokens=8,
        temperature=1.0,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="bfloat16",
        return_token_ids=True,
    )
    moved = folder.rename(tmp_path / "moved")
    assert main(["verify", str(path), "--rows", "5", "-m", str(moved)]) == 0
    out, err = capsys.readouterr()
    assert "token ids of 5 of 8 rows compared, 5 equal" in out and "warning" not in err
    rewrite(path, "token_ids", lambda column: [[7, *ids[1:]] for ids in column])
    assert main(["verify", str(path), "--json", "-m", str(moved)]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["rows_different"] == 8 and f"loading {moved}\n" in err
