from __future__ import annotations

import csv
import io
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch_cli.data.csv_source import read_csv
from cbatch_cli.data.input_files import InputFile
from cbatch_cli.errors import UsageError
from tests.data.input_reading import errors, open_inputs, read_rows, read_table


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_all_columns_are_strings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,prompt,note\n1,Hello,\n007,,x\n")
    table = read_table(path)
    assert table.schema == pa.schema([(name, pa.string()) for name in ("id", "prompt", "note")])
    assert table.to_pylist() == [
        {"id": "1", "prompt": "Hello", "note": ""},
        {"id": "007", "prompt": "", "note": "x"},
    ]


def test_quotes_commas_and_line_ends_inside_of_fields(tmp_path: Path) -> None:
    data = 'id,prompt\r\n1,"two\r\nlines, ""quoted"""\r\n\r\n2,"a\n\nb"\r\n3,last'
    rows = read_rows(write(tmp_path / "a.csv", data))
    assert [row.columns["prompt"] for row in rows] == ['two\r\nlines, "quoted"', "a\n\nb", "last"]
    assert rows[0].content_hash == blake2b(b'1,"two\r\nlines, ""quoted"""', digest_size=16).digest()


@pytest.mark.parametrize("name", ["a.tsv", "a.tab", "a.csv"])
def test_tabs(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, 'id\tprompt\n1\t"a\tb, c"\n\tx\n')
    assert [row.columns for row in read_rows(path)] == [
        {"id": "1", "prompt": "a\tb, c"},
        {"id": "", "prompt": "x"},
    ]


def test_a_tsv_header_may_hold_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "id, number\tprompt\n1\tx\n")
    assert open_inputs(path).column_names == ("id, number", "prompt")


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    data = b'id,prompt\n1,ok\n2\n3,x,y\n4,"a"b\n5,\xff\n6,"\xff\n"\n7,ok\n8,"no end\n9,swallowed\n'
    rows = read_rows(write(tmp_path / "a.csv", data))
    bad = ["invalid_json"] * 5
    assert errors(rows) == [None, *bad, None, "invalid_json"]
    messages = [row.error.message for row in rows if row.error]
    assert "1 fields, the header has 2" in messages[0]
    assert "3 fields" in messages[1]
    assert "malformed" in messages[2]
    assert messages[3] == messages[4] == "not UTF-8"
    assert "unexpected end of data" in messages[5]
    assert len({row.content_hash for row in rows}) == len(rows)


def test_old_line_ends_are_refused(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.csv", "prompt\na\rb\nc\n"))
    assert errors(rows) == ["invalid_json", None]
    assert rows[0].error is not None
    assert "universal" not in rows[0].error.message


def test_a_record_over_the_limit_ends_where_the_limit_was_met(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'id,prompt\n1,"' + "x\n" * 100 + "\n2,ok\n3,ok\n")
    rows = read_rows(path, max_line_bytes=100)
    assert errors(rows)[0] == "invalid_json"
    assert rows[0].error is not None
    assert "unclosed" in rows[0].error.message
    assert [row.columns.get("id") for row in rows[-2:]] == ["2", "3"]


def test_a_line_over_the_limit_is_one_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,prompt\n1," + "x" * 300_000 + "\n2,ok\n")
    assert errors(read_rows(path, max_line_bytes=1000)) == ["invalid_json", None]
    # Above the limit that the csv module has by itself.
    assert errors(read_rows(path)) == [None, None]


def test_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "\ufeffprompt\nx\n")
    assert open_inputs(path).column_names == ("prompt",)


@pytest.mark.parametrize("data", ["", "\n\n"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: str) -> None:
    with pytest.raises(UsageError, match="starts with a header"):
        open_inputs(write(tmp_path / "a.csv", data))


def test_bad_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than one column 'a'"):
        open_inputs(write(tmp_path / "a.csv", "a,b,a\n"))
    with pytest.raises(UsageError, match="header of .*not UTF-8"):
        open_inputs(write(tmp_path / "b.csv", b"a,\xff\n"))


def test_a_header_alone_gives_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,b\n")
    assert read_rows(path) == []
    assert read_table(path).schema.names == ["prompt", "b"]


def test_files_with_other_columns(tmp_path: Path) -> None:
    first = write(tmp_path / "1.csv", "a,prompt\n1,x\n")
    second = write(tmp_path / "2.csv", "prompt,b\ny,2\n")
    table = read_table([first, second])
    assert table.schema.names == ["a", "prompt", "b", "source_file"]
    assert table.to_pylist() == [
        {"a": "1", "prompt": "x", "b": None, "source_file": str(first)},
        {"a": None, "prompt": "y", "b": "2", "source_file": str(second)},
    ]


def test_selected_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,prompt,b\n1,x,2\n")
    assert read_table(path, columns="b").to_pylist() == [{"b": "2"}]
    assert read_rows(path, columns="b")[0].columns == {"b": "2", "prompt": "x"}
    with pytest.raises(UsageError, match="'c'"):
        open_inputs(path, columns="c")


fields = st.text("ab,\"\n\r\t '0é;", max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(fields, fields), max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_what_the_csv_module_writes_is_read_back(
    records: list[tuple[str, str]], line_end: str
) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows([("x", "y"), *records])
    stream = io.BufferedReader(io.BytesIO(buffer.getvalue().encode()))  # type: ignore[arg-type]
    read = list(read_csv(stream, InputFile("a.csv", "a.csv"), max_line_bytes=1000))
    assert [record.error for record in read] == [None] * len(records)
    assert [tuple(record.columns.values()) for record in read] == records
