from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.data.csv_source import CsvSource
from cbatch_cli.data.jsonl_source import JsonlSource
from cbatch_cli.data.parquet_source import ParquetSource
from cbatch_cli.errors import UsageError
from tests.data.input_reading import open_inputs, read_rows

ROW = b'{"prompt": "x"}\n'


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def parquet(path: Path) -> Path:
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    return path


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jsonl", ROW, JsonlSource),
        ("a.ndjson", ROW, JsonlSource),
        ("a.json", ROW, JsonlSource),
        ("a.json", b"broken\n" + ROW, JsonlSource),
        ("a.JSONL.GZ", gzip.compress(ROW), JsonlSource),
        ("a.csv", b"prompt\nx\n", CsvSource),
        ("a.tsv.gz", gzip.compress(b"prompt\ta\nx\t1\n"), CsvSource),
        # Suffixes that say nothing.
        ("a", ROW, JsonlSource),
        ("a.txt", b"\xef\xbb\xbf \n{broken\n" + ROW, JsonlSource),
        ("a.log", gzip.compress(b"broken\n" + ROW), JsonlSource),
        ("a.gz", gzip.compress(ROW), JsonlSource),
        ("empty", b"", JsonlSource),
    ],
)
def test_formats(tmp_path: Path, name: str, data: bytes, kind: type) -> None:
    assert type(open_inputs(write(tmp_path / name, data))) is kind


@pytest.mark.parametrize("name", ["a.parquet", "a.pq", "a", "a.json"])
def test_parquet(tmp_path: Path, name: str) -> None:
    assert type(open_inputs(parquet(tmp_path / name))) is ParquetSource


def test_the_suffix_counts_more_than_the_content(tmp_path: Path) -> None:
    assert type(open_inputs(write(tmp_path / "a.csv", ROW))) is CsvSource
    assert type(open_inputs(write(tmp_path / "a.jsonl", b"[1]\n" + ROW))) is JsonlSource


def test_the_option_counts_more_than_the_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ROW)
    assert type(open_inputs(path, input_format="jsonl")) is JsonlSource
    assert open_inputs(path, input_format="openai").is_openai
    assert type(open_inputs(parquet(tmp_path / "b.csv"), input_format="parquet")) is ParquetSource
    assert type(open_inputs(write(tmp_path / "c", b"a b\n"), input_format="csv")) is CsvSource


def test_a_format_that_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot tell the format of .*a.txt.*--input-format"):
        open_inputs(write(tmp_path / "a.txt", b"hello\nworld\n"))


@pytest.mark.parametrize("data", [b"[\n  {}\n]", b'[{"a": 1}]', b"\xef\xbb\xbf\n [1]"])
@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_a_json_array_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(UsageError, match="one JSON array, not JSON Lines"):
        open_inputs(write(tmp_path / name, data))


def test_formats_do_not_mix(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", ROW)
    with pytest.raises(UsageError, match="1.jsonl is jsonl, .*2.parquet is parquet"):
        open_inputs([first, parquet(tmp_path / "2.parquet")])


def test_compressions_do(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", ROW)
    second = write(tmp_path / "2.jsonl.gz", gzip.compress(ROW))
    assert len(read_rows([first, second])) == 2


def test_opening_many_files_reads_no_rows_of_theirs(tmp_path: Path) -> None:
    """All but the first are cut short, which only reading them finds out."""
    write(tmp_path / "0.jsonl", ROW * 1024)
    for number in range(1, 5):
        write(tmp_path / f"{number}.jsonl.gz", b"\x1f\x8b")
    open_inputs(tmp_path)
    with pytest.raises(UsageError, match="1.jsonl.gz"):
        read_rows(tmp_path)
