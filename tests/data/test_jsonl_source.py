from __future__ import annotations

import gzip
import json
import tracemalloc
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cbatch_cli.data import jsonl_source
from cbatch_cli.data.fields import INTEGER_KEY, JSON_KEY, note
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.errors import UsageError
from tests.data.input_reading import (
    choose,
    errors,
    open_inputs,
    read_rows,
    read_table,
    write_jsonl,
)

MIXED = b"""{"id": "a", "prompt": "The capital of France is", "score": 1}

{"id": "b", "prompt": "", "score": 2}
{"id": "c", "prompt": "broken
{"id": "d", "score": 4}
{"id": "e", "prompt": null, "score": 5}
{"id": "f", "prompt": 123, "score": 6}
{"id": "i", "prompt": "Two plus two is", "score": NaN}
[1, 2, 3]
{"id": "k", "prompt": "lone \\ud800 surrogate", "score": 11}
{"id": "m", "prompt": "  Leading spaces and a trailing newline\\n", "score": 13}
"""


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_bad_lines_are_rows_with_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.jsonl", MIXED)
    rows = read_rows(path)
    assert [row.index for row in rows] == list(range(10))
    bad = {2: "invalid_json", 7: "bad_type", 8: "invalid_json"}
    assert errors(rows) == [bad.get(index) for index in range(10)]
    assert all(rows[index].columns == {} for index in bad)
    table = read_table(path)
    assert table.schema.names == ["id", "prompt", "score", "cbatch_extra"]
    assert table["id"].to_pylist() == ["a", "b", None, "d", "e", "f", "i", None, None, "m"]
    assert table["score"].to_pylist() == [1, 2, None, 4, 5, 6, None, None, None, 13]
    assert table["score"].type == pa.int64()
    assert table["prompt"].type == pa.string()
    assert table["prompt"].to_pylist()[5] is None
    assert table["cbatch_extra"].to_pylist() == [None] * 5 + ['{"prompt":123}'] + [None] * 4


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n \t\n"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_marks_line_ends_and_blank_lines(
    tmp_path: Path, newline: bytes, start: bytes, end: bytes
) -> None:
    texts = ["one", "two", "line\u2028separator\x85\x0c"]
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    data = start + (newline + newline).join(lines) + end
    rows = read_rows(write(tmp_path / "a.jsonl", data))
    assert [row.columns["text"] for row in rows] == ["one", "two", "line\u2028separator\x85\x0c"]
    # How lines end has no part in what a row is.
    expected = [blake2b(line, digest_size=16).digest() for line in lines]
    assert [row.content_hash for row in rows] == expected


def test_control_characters_in_strings_are_not_json(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.jsonl", b'{"text": "a\tb"}\n{"text": "x"}\n'))
    assert errors(rows) == ["invalid_json", None]


def test_a_line_over_the_limit_is_one_bad_row(tmp_path: Path) -> None:
    long_line = b'{"text": "' + b"x" * 500_000 + b'"}\n'
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n' + long_line + b'{"text": "b"}\n')
    rows = read_rows(path, max_line_bytes=1000)
    assert errors(rows) == [None, "invalid_json", None]
    assert rows[1].error is not None
    assert "1000 bytes" in rows[1].error.message
    assert rows[1].content_hash == blake2b(long_line, digest_size=16).digest()
    assert errors(read_rows(path)) == [None, None, None]


def test_hostile_lines_do_not_harm_their_neighbours(tmp_path: Path) -> None:
    hostile = [
        b'{"text": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"a":' * 100_000,
        b'{"text": "\xff\xfe"}',
        b'{"text": "\\udfff"}',
        b'{"n": 1' + b"0" * 10_000 + b"}",
        b"\x00" * 1000,
        b"\x1f\x8b\x08\x00garbage",
        b'{"text": "x"} trailing',
        b'"' * 1001,
        b"null",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
    ]
    data = b"".join(b'{"text": "ok"}\n' + line + b"\n" for line in hostile)
    rows = read_rows(write(tmp_path / "a.jsonl", data))
    assert len(rows) == 2 * len(hostile)
    assert all(row.columns == {"text": "ok"} for row in rows[::2])
    assert None not in errors(rows[1::2])


def test_numbers_survive_exactly(tmp_path: Path) -> None:
    big = 123456789012345678901234567890
    lines = [
        f'{{"text": "a", "big": {big}, "id": 9007199254740993, "mix": 1, "ratio": 1e400}}',
        f'{{"text": "b", "big": 7, "id": {2**63 - 1}, "mix": 0.5, "ratio": 0.1}}',
    ]
    table = read_table(write(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    assert table["big"].to_pylist() == [str(big), "7"]
    assert note(table.schema.field("big"), INTEGER_KEY)
    assert table["id"].to_pylist() == [2**53 + 1, 2**63 - 1]
    assert table["mix"].to_pylist() == [1.0, 0.5]
    assert table["ratio"].to_pylist() == [float("inf"), 0.1]


def test_types_come_from_the_first_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [{"text": f"t{i}", "n": i} for i in range(10)]
    rows += [{"text": "late", "n": "no number", "new": [1]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(jsonl_source, "FIRST_ROWS", 10)
    table = read_table(path)
    assert table.schema.names == ["text", "n", "cbatch_extra"]
    assert table["n"].to_pylist() == [*range(10), None]
    assert table["cbatch_extra"].to_pylist()[-1] == '{"n":"no number","new":[1]}'
    monkeypatch.setattr(jsonl_source, "FIRST_ROWS", 11)
    assert read_table(path).schema.names == ["text", "n", "new", "cbatch_extra"]
    monkeypatch.setattr(jsonl_source, "FIRST_BYTES", 1)
    assert read_table(path)["n"].to_pylist()[:2] == [0, 1]
    assert "new" not in read_table(path).schema.names


def test_opening_reads_no_more_than_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut short after its first rows: only reading on may find that out."""
    data = b"".join(b'{"text": "%032x"}\n' % (i * 0x9E3779B97F4A7C15F39C) for i in range(50_000))
    packed = gzip.compress(data)
    path = write(tmp_path / "a.jsonl.gz", packed[: len(packed) * 2 // 3])
    source = open_inputs(path)
    rows = source.rows(choose(source))
    assert next(rows).columns["text"] == "0" * 32
    num_read = 1
    with pytest.raises(UsageError, match="a.jsonl.gz"):
        for _ in rows:
            num_read += 1
    assert num_read > 10_000


def test_the_prompt_is_a_string_whatever_its_rows_hold(tmp_path: Path) -> None:
    rows = [{"prompt": i, "input": i, "instruction": i} for i in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "x"}])
    source = open_inputs(path)
    schema = source.arrow_schema(PromptColumns("text", "prompt"))
    assert schema.field("prompt").type == pa.string()
    assert not schema.field("prompt").metadata
    assert schema.field("input").type == pa.int64()
    schema = source.arrow_schema(PromptColumns("instruction", "instruction", "input"))
    assert schema.field("input").type == pa.string()


def test_messages_are_typed_where_all_are_alike(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": plain}] * 3)
    assert read_table(path)["messages"].to_pylist() == [plain] * 3
    path = write_jsonl(tmp_path / "b.jsonl", [{"messages": plain}, {"messages": parts}])
    table = read_table(path)
    assert note(table.schema.field("messages"), JSON_KEY)
    assert [json.loads(text) for text in table["messages"].to_pylist()] == [plain, parts]


def test_selected_columns(tmp_path: Path) -> None:
    rows = [{"a": i, "prompt": f"p{i}", "b": [i], "sampling_params": {"seed": i}} for i in range(3)]
    path = write_jsonl(
        tmp_path / "a.jsonl", [*rows, {"b": "x", "prompt": "p3", "new": 1}] + rows * 5
    )
    assert read_table(path, columns="none").schema.names == []
    table = read_table(path, columns="b,a")
    assert table.schema.names == ["a", "b", "cbatch_extra"]
    # Columns that nobody asked for do not go to the extra column.
    assert table["cbatch_extra"].to_pylist()[:4] == [None, None, None, '{"b":"x"}']
    read = read_rows(path, columns="a")[0].columns
    assert read == {"a": 0, "prompt": "p0", "sampling_params": {"seed": 0}}
    source = open_inputs(path, columns="none")
    assert next(source.rows(PromptColumns("template"))).columns == rows[0]
    with pytest.raises(UsageError, match="'c'.*'a', 'prompt', 'b', 'sampling_params', 'new'"):
        open_inputs(path, columns="a,c")


def test_several_files_are_numbered_through(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"text": f"{i}-{j}"} for j in range(2)])
        for i in range(3)
    ]
    rows = read_rows(paths)
    assert [(row.index, row.columns["text"]) for row in rows] == [
        (0, "0-0"),
        (1, "0-1"),
        (2, "1-0"),
        (3, "1-1"),
        (4, "2-0"),
        (5, "2-1"),
    ]
    table = read_table(paths)
    assert table.schema.names == ["text", "source_file", "cbatch_extra"]
    assert table["source_file"].to_pylist() == [str(path) for path in paths for _ in range(2)]
    assert read_table(paths, columns="none").schema.names == ["source_file"]


def test_limit_stops_reading(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "1.jsonl", [{"text": str(i)} for i in range(5)])
    bad = write(tmp_path / "2.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 100)[:-10])
    source = open_inputs([good, good], limit=7)
    rows = source.rows(choose(source))
    assert source.fraction_read == 0.0
    assert len(list(rows)) == 7
    assert source.fraction_read == 1.0
    assert len(read_rows(good, limit=5)) == 5
    assert len(read_rows(good, limit=6)) == 5
    with pytest.raises(UsageError):
        read_rows([good, bad], limit=200)


def test_rows_can_be_read_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 1000} for _ in range(1000)])
    source = open_inputs(path)
    prompt = choose(source)
    first = list(source.rows(prompt))
    assert source.fraction_read == 1.0
    again = source.rows(prompt)
    assert next(again) == first[0]
    assert source.fraction_read < 0.5
    assert list(again) == first[1:]
    assert source.fraction_read == 1.0


def test_an_input_without_readable_rows(tmp_path: Path) -> None:
    empty = write(tmp_path / "a.jsonl", b"")
    assert read_rows(empty, prompt_column="x") == []
    assert read_table(empty, prompt_column="x").schema.names == ["cbatch_extra"]
    with pytest.raises(UsageError, match="no readable row"):
        read_rows(empty)
    broken = write(tmp_path / "b.jsonl", b"{\n")
    assert errors(read_rows(broken, prompt_column="x")) == ["invalid_json"]


BATCH_LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_openai_lines_are_recognised(tmp_path: Path) -> None:
    lines = [BATCH_LINE, BATCH_LINE | {"body": None}, BATCH_LINE]
    path = write(tmp_path / "a.jsonl", b"{\n" + "\n".join(map(json.dumps, lines)).encode())
    source = open_inputs(path)
    assert source.is_openai
    assert not open_inputs(path, input_format="jsonl").is_openai
    table = read_table(path)
    assert table.schema.names == ["custom_id", "method", "url", "body", "cbatch_extra"]
    assert note(table.schema.field("body"), JSON_KEY)
    assert table["body"].to_pylist() == [None, '{"prompt":"x"}', None, '{"prompt":"x"}']
    plain = write_jsonl(tmp_path / "b.jsonl", [BATCH_LINE, {"text": "x"}, {"text": "x"}])
    assert not open_inputs(plain).is_openai
    assert open_inputs(plain, input_format="openai").is_openai


def test_openai_keys_are_read_whichever_columns_pass(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [BATCH_LINE])
    assert read_rows(path, columns="none")[0].columns == BATCH_LINE


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": "x" * 1000} for _ in range(6000)))
    source = open_inputs(path)
    rows = source.rows(choose(source))
    for _ in range(1000):
        next(rows)
    tracemalloc.start()
    try:
        for _ in rows:
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
