"""`cbatch verify --input`: another input is refused, and the run's own is known again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.cli import main
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.errors import UsageError
from tests.verifying import rows_of, run, verify


def test_another_input_is_refused_by_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(tmp_path, rows_of(5))
    other = tmp_path / "other.jsonl"
    # Prompts with as many tokens.
    other.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(5)))
    with pytest.raises(
        UsageError, match="row 0 of .*other.jsonl has another 'prompt' than the out"
    ):
        verify(path, inputs=(str(other),))
    assert main(["verify", str(path), "--input", str(other)]) == 2
    capsys.readouterr()
    other.write_text("".join(json.dumps({"question": f"p{i}"}) + "\n" for i in range(5)))
    with pytest.raises(UsageError, match="is not the input of this output, which has no column 'q"):
        verify(path, inputs=(str(other),))
    other.write_text("no json\n" + "".join(json.dumps(row) + "\n" for row in rows_of(5)[1:]))
    with pytest.raises(UsageError, match="row 0 of .* cannot be read, and has an answer"):
        verify(path, inputs=(str(other),))
    # Columns that no prompt is made from may change.
    other.write_text("".join(json.dumps({"prompt": f"p{i}", "more": 1}) + "\n" for i in range(5)))
    assert verify(path, inputs=(str(other),))["rows_equal"] == 5


def test_sampling_and_template_columns_of_another_input(tmp_path: Path) -> None:
    rows = [{"q": f"q{i}", "sampling_params": {"max_tokens": 3}} for i in range(3)]
    source, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    path = run(tmp_path, rows, template="{{ q }}")
    assert verify(path, inputs=(str(source),))["rows_equal"] == 3
    for change, name in (
        ({"q": "x2"}, "q"),
        ({"sampling_params": {"top_k": 1}}, "sampling_params"),
    ):
        lines = [*rows[:2], {**rows[2], **change}]
        other.write_text("".join(json.dumps(row) + "\n" for row in lines))
        with pytest.raises(UsageError, match=f"row 2 of .* has another '{name}' than the output"):
            verify(path, inputs=(str(other),))


def test_another_input_where_no_prompt_was_kept(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(5), columns="more")
    other = tmp_path / "other.jsonl"
    other.write_bytes((tmp_path / "in.jsonl").read_bytes())
    assert verify(path, inputs=(str(other),))["rows_equal"] == 5
    other.write_bytes(other.read_bytes().replace(b"p3", b"q3"))
    with pytest.raises(UsageError, match="other.jsonl is not what the run read, or was changed"):
        verify(path, inputs=(str(other),))


def test_an_output_that_does_not_tell_of_its_input(tmp_path: Path) -> None:
    path = run(tmp_path, rows_of(5), columns="none")
    note = read_note(path, METADATA_KEY)
    del note["identity"]  # as earlier versions wrote it
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(note)}), path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"q{i}"}) + "\n" for i in range(5)))
    assert verify(path, inputs=(str(other),))["rows_compared"] == 5
    other.write_text("".join(json.dumps({"prompt": f"q {i}"}) + "\n" for i in range(5)))
    with pytest.raises(UsageError, match="had 2 tokens and has 3 now"):
        verify(path, inputs=(str(other),))


@pytest.mark.parametrize("is_zipped", [False, True])
def test_standard_input_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zipped: bool
) -> None:
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows_of(5))
    source = tmp_path / "source"
    source.write_bytes(gzip.compress(text) if is_zipped else text)
    with source.open("rb") as stream:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
        path = run(tmp_path, [], inputs=("-",), columns="none")
    assert verify(path, inputs=(str(source),))["rows_equal"] == 5


ODD_VALUES: list[dict[str, Any]] = [
    {"a": 1, "b": {"x": 1, "y": "one"}, "c": [1, 2], "d": "plain", "e": 2**70, "s": 2},
    {"a": 2.5, "b": {"x": 2}, "c": [], "d": "ü", "e": -(2**70), "s": 2**62 + 1},
    {"a": 2**60 + 1, "b": None, "c": None, "d": None, "e": 3, "f": "later"},
    {
        "a": "text",
        "b": [1],
        "c": {"z": [{"k": None}, 2**80 + 1, 10**400]},
        "d": 7,
        "e": None,
        "s": "no",
    },
    {"b": {"x": 1e300, "z": True}, "c": [[1]], "d": "", "e": 10**400, "s": {"t": [1.5, None]}},
]
USUAL = {"a": 1.0, "b": {"x": 1, "y": "one"}, "c": [1, 2], "d": "plain", "e": 1, "s": 1}


@pytest.mark.parametrize("num_usual", [0, 60])
@pytest.mark.parametrize("columns", ["all", "a,prompt"])
def test_an_input_is_its_own_whatever_its_values_became(
    tmp_path: Path, num_usual: int, columns: str
) -> None:
    odd = [*ODD_VALUES, *[USUAL] * num_usual]
    rows: list[Any] = [{"prompt": f"p{i}", **values} for i, values in enumerate(odd)]
    rows += ['{"prompt": "p", "a": NaN, "b": {"x": Infinity}, "e": 1e999}']
    path = run(tmp_path, rows, columns=columns, template="{{ prompt }}")
    found = verify(path, inputs=(str(tmp_path / "in.jsonl"),), num_rows=100)
    assert found["rows_equal"] == num_usual + 6


def test_messages_are_compared_whatever_keys_they_have(tmp_path: Path) -> None:
    def chat(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text, **more}, {"role": "user"}]}

    template = "{{ messages[0].content }}"
    path = run(tmp_path, [chat("a"), chat("b", name="n"), chat("c", tags=[])], template=template)
    assert verify(path, inputs=(str(tmp_path / "in.jsonl"),))["rows_equal"] == 3
    other = tmp_path / "other.jsonl"
    longer = {"messages": [*chat("b", name="n")["messages"], {"role": "user"}]}
    for second in (chat("x"), longer):
        chats = (chat("a"), second, chat("c", tags=[]))
        other.write_text("".join(json.dumps(row) + "\n" for row in chats))
        with pytest.raises(UsageError, match="row 1 of .* has another 'messages'"):
            verify(path, inputs=(str(other),))


@pytest.mark.parametrize("content", ["prompt,n\np0,\n,1\np2,x\n", "prompt\nä\n\nü\n"])
def test_a_csv_is_its_own(tmp_path: Path, content: str) -> None:
    source = tmp_path / "in.csv"
    source.write_text(content)
    path = run(tmp_path, [], inputs=(str(source),))
    found = verify(path, inputs=(str(source),))
    assert found["rows_equal"] == found["rows"] - found["rows_failed"] >= 2


def test_a_parquet_file_is_its_own(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    messages = [
        [{"role": "user", "content": "a", "extra": None}],
        [{"role": "user", "content": "b"}],
    ]
    when = pa.array([1, None], pa.timestamp("ns"))
    kind = pa.array(["x", "y"]).dictionary_encode()
    table = {
        "prompt": ["a", "b"],
        "m": messages,
        "when": when,
        "kind": kind,
        "raw": [b"\xff", None],
    }
    pq.write_table(pa.table(table), source)
    path = run(tmp_path, [], inputs=(str(source),), template="{{ prompt }} {{ kind }}")
    assert verify(path, inputs=(str(source),))["rows_equal"] == 2
