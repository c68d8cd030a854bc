from __future__ import annotations

import datetime
import decimal
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.data import parquet_source
from cbatch_cli.data.fields import EXTRA_KEY, JSON_KEY, json_field
from cbatch_cli.data.parquet_source import ParquetSource
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.errors import UsageError
from tests.data.input_reading import choose, errors, open_inputs, read_rows, read_table

TEMPLATE = PromptColumns("template")

COLUMNS: dict[str, pa.Array[Any]] = {
    "nanoseconds": pa.array([1, None, 1_700_000_000_123_456_789], pa.timestamp("ns")),
    "with_zone": pa.array([1, None, 1_700_000_000_123_456_789], pa.timestamp("ns", "Asia/Tokyo")),
    "seconds": pa.array([1, None, 3], pa.timestamp("ms")),
    "duration": pa.array([1, None, 3], pa.duration("ns")),
    "time": pa.array([1, None, 3], pa.time64("ns")),
    "far_date": pa.array([1, None, 10**7], pa.date32()),
    "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("9" * 36 + ".11")]),
    "wide_decimal": pa.array([decimal.Decimal("9" * 60 + ".1"), None, None], pa.decimal256(70, 2)),
    "binary": pa.array([b"\xff\x00", None, b""]),
    "fixed_binary": pa.array([b"abcd", None, b"efgh"], pa.binary(4)),
    "half": pa.array(np.array([1.5, 2, 65504], np.float16)),
    "single": pa.array([0.1, None, float("nan")], pa.float32()),
    "unsigned": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "tiny": pa.array([-128, None, 127], pa.int8()),
    "nested": pa.array(
        [[{"a": 1, "b": [1.5]}], None, []],
        pa.list_(pa.struct([("a", pa.int8()), ("b", pa.list_(pa.float32()))])),
    ),
    "nested_nanoseconds": pa.array([[1], None, []], pa.list_(pa.timestamp("ns"))),
    "map": pa.array([[("k", 1), ("k", 2)], None, []], pa.map_(pa.string(), pa.int64())),
    "large_string": pa.array(["a", None, "c"], pa.large_string()),
    "dictionary": pa.array(["a", None, "c"]).dictionary_encode(),
    "fixed_list": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    "large_list": pa.array([["a"], None, []], pa.large_list(pa.large_string())),
    "nulls": pa.nulls(3),
    "json": pa.array(['{"a":1}', None, "1"], pa.json_()),
    "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=8).bytes], pa.uuid()),
    "boolean": pa.array([True, None, False]),
}


def write(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


def prompts(count: int) -> list[str]:
    return [f"p{i}" for i in range(count)]


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_passes_through_exactly(tmp_path: Path, name: str) -> None:
    table = pa.table({"prompt": ["x", "y", "z"], name: COLUMNS[name]})
    path = write(tmp_path / "a.parquet", table, row_group_size=2)
    read = read_table(path)
    assert read.schema == table.schema
    # As text, in which NaN equals itself. Arrow itself renames items of lists inside of structs.
    expected = pq.read_table(path)[name].combine_chunks()
    assert read[name].combine_chunks().to_string() == expected.to_string()
    again = write(tmp_path / "b.parquet", read)
    assert pq.read_table(again).schema == table.schema


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_can_be_given_to_a_template(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": ["x", "y", "z"], name: COLUMNS[name]})
    rows = list(open_inputs(path).rows(TEMPLATE))
    assert [row.columns["prompt"] for row in rows] == ["x", "y", "z"]
    assert all(name in row.columns for row in rows)
    assert len({row.content_hash for row in rows}) == 3


def test_python_values_of_types_that_python_cannot_hold(tmp_path: Path) -> None:
    names = ["nanoseconds", "far_date", "map", "dictionary", "nested_nanoseconds"]
    table = pa.table({name: COLUMNS[name] for name in names})
    rows = list(open_inputs(write(tmp_path / "a.parquet", table)).rows(TEMPLATE))
    assert [row.columns["nanoseconds"] for row in rows] == [
        "1970-01-01 00:00:00.000000001",
        None,
        "2023-11-14 22:13:20.123456789",
    ]
    assert rows[2].columns["far_date"].startswith("29349-")
    assert rows[0].columns["map"] == {"k": 2}
    assert rows[2].columns["dictionary"] == "c"
    assert rows[0].columns["nested_nanoseconds"] == ["1970-01-01 00:00:00.000000001"]


def test_times_of_no_known_zone_end_the_run(tmp_path: Path) -> None:
    times = pa.array([1], pa.timestamp("us", "Mars/Phobos"))
    path = write(tmp_path / "a.parquet", {"prompt": ["x"], "time": times})
    assert len(read_rows(path)) == 1
    with pytest.raises(UsageError, match="a.parquet.*Phobos"):
        list(open_inputs(path).rows(TEMPLATE))


def test_views_and_narrow_dictionaries_get_types_that_can_be_gathered(tmp_path: Path) -> None:
    narrow = pa.dictionary(pa.int8(), pa.string())
    groups = [
        pa.table(
            {
                "prompt": pa.array([f"{start + i}" for i in range(100)], pa.string_view()),
                "label": pa.array([f"l{start + i}" for i in range(100)]).cast(narrow),
                "labels": pa.ListArray.from_arrays(
                    pa.array(range(101), pa.int32()),
                    pa.array([f"n{start + i}" for i in range(100)]).cast(narrow),
                ),
                "bytes": pa.array([b"x"] * 100, pa.binary_view()),
                "list": pa.array([["v"]] * 100, pa.list_(pa.string_view())),
            }
        )
        for start in range(0, 500, 100)
    ]
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group)
    table = read_table(path)
    assert table.schema.types == [
        pa.large_string(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
        pa.large_binary(),
        pa.list_(pa.large_string()),
    ]
    # Gathering is what the sink does with the rows of a part; no index of 8 bits has room here.
    gathered = table.combine_chunks().take(list(range(499, -1, -1)))
    assert gathered["label"].to_pylist() == [f"l{i}" for i in range(499, -1, -1)]
    assert gathered["labels"].to_pylist() == [[f"n{i}"] for i in range(499, -1, -1)]
    assert table["prompt"].to_pylist() == [str(i) for i in range(500)]


def test_only_needed_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "prompt": prompts(3),
        "a": [1, 2, 3],
        "b": [4, 5, 6],
        "prompt.x": [7, 8, 9],
        "sampling_params": [{"seed": 1}, None, {"seed": 3}],
    }
    path = write(tmp_path / "a.parquet", table)
    asked = []
    read_batches = parquet_source._read_batches

    def record(parquet: Any, schema: pa.Schema, names: list[str], *others: Any) -> Any:
        asked.append(list(names))
        return read_batches(parquet, schema, names, *others)

    monkeypatch.setattr(parquet_source, "_read_batches", record)
    rows = read_rows(path, columns="b")
    assert asked == [["prompt", "b", "sampling_params"]]
    assert rows[0].columns == {"prompt": "p0", "sampling_params": {"seed": 1}}
    assert rows[0].arrow is not None
    assert rows[0].arrow.batch.schema.names == ["b"]
    assert read_table(path, columns="b").to_pydict() == {"b": [4, 5, 6]}
    none = read_rows(path, columns="none")
    assert none[0].arrow is None
    assert read_table(path, columns="none").schema.names == []


def test_row_groups_are_read_one_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"prompt": prompts(2500), "n": list(range(2500))}
    path = write(tmp_path / "a.parquet", table, row_group_size=1000)
    sizes = []
    conform = parquet_source._conform

    def record(batch: pa.RecordBatch, fields: list[pa.Field[Any]]) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return conform(batch, fields)

    monkeypatch.setattr(parquet_source, "_conform", record)
    source = open_inputs(path)
    rows = source.rows(choose(source))
    first = next(rows)
    assert (first.index, first.columns) == (0, {"prompt": "p0"})
    assert sizes == [512]
    assert [row.index for row in rows] == list(range(1, 2500))
    assert sizes == [512, 488, 512, 488, 500]
    monkeypatch.setattr(parquet_source, "BATCH_BYTES", 1)
    next(source.rows(choose(source)))
    assert sizes[-1] == 1


def test_hashes_depend_on_values_alone(tmp_path: Path) -> None:
    table = pa.table({"prompt": prompts(50), "n": range(50), "s": [["a", None]] * 50})
    plain = read_rows(write(tmp_path / "a.parquet", table))
    other = write(tmp_path / "b.parquet", table, row_group_size=7, compression="zstd")
    assert [row.content_hash for row in read_rows(other)] == [row.content_hash for row in plain]
    assert len({row.content_hash for row in plain}) == 50
    assert {len(row.content_hash) for row in plain} == {16}
    large = table.set_column(0, "prompt", table["prompt"].cast(pa.large_string()))
    hashes = [row.content_hash for row in read_rows(write(tmp_path / "c.parquet", large))]
    assert hashes == [row.content_hash for row in plain]
    changed = table.set_column(1, "n", pa.array([*range(49), 7]))
    rows = read_rows(write(tmp_path / "d.parquet", changed))
    assert [a.content_hash == b.content_hash for a, b in zip(rows, plain, strict=True)] == [
        True
    ] * 49 + [False]


def test_text_that_is_not_utf8_fails_its_row_alone(tmp_path: Path) -> None:
    texts = pa.array([b"ok", b"\xff\xfe", b"fine", None, b"\xed\xa0\x80"], pa.binary())
    bad = pa.StringArray.from_buffers(5, *texts.buffers()[1:], texts.buffers()[0])
    path = write(tmp_path / "a.parquet", {"prompt": bad, "n": [1, 2, 3, 4, 5]})
    rows = read_rows(path)
    assert errors(rows) == [None, "invalid_json", None, None, "invalid_json"]
    assert [row.columns.get("prompt") for row in rows] == ["ok", None, "fine", None, None]
    assert [row.index for row in rows] == list(range(5))
    assert len({row.content_hash for row in rows}) == 5
    assert read_table(path)["n"].to_pylist() == [1, None, 3, 4, None]


def test_number_of_rows_limit_and_fraction(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.parquet", {"prompt": prompts(10)}) for i in range(2)]
    source = open_inputs(paths)
    assert source.num_rows == 20
    rows = source.rows(choose(source))
    assert source.fraction_read == 0.0
    for _ in range(5):
        next(rows)
    assert source.fraction_read == 0.25
    assert len(list(rows)) == 15
    assert source.fraction_read == 1.0
    limited = open_inputs(paths, limit=12)
    assert limited.num_rows == 12
    assert len(list(limited.rows(choose(limited)))) == 12
    assert limited.fraction_read == 1.0
    assert open_inputs(paths, limit=50).num_rows == 20


def test_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": pa.array([], pa.string())})
    source = open_inputs(path)
    assert source.num_rows == 0
    assert source.fraction_read == 1.0
    assert read_table(path).num_rows == 0


def test_files_whose_columns_differ(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet", {"prompt": ["x"], "n": pa.array([1], pa.int32())})
    second = write(
        tmp_path / "2.parquet",
        {
            "extra": pa.array([b"b"]),
            "n": pa.array([2**40], pa.int64()),
            "prompt": pa.array(["y"], pa.large_string()),
        },
    )
    table = read_table([first, second])
    assert table.schema.names == ["prompt", "n", "extra", "source_file"]
    assert table.schema.field("n").type == pa.int64()
    assert table.to_pylist() == [
        {"prompt": "x", "n": 1, "extra": None, "source_file": str(first)},
        {"prompt": "y", "n": 2**40, "extra": b"b", "source_file": str(second)},
    ]


def test_a_column_of_nulls_in_one_file(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet", {"prompt": ["x"], "n": pa.nulls(1)})
    second = write(tmp_path / "2.parquet", {"prompt": ["y"], "n": [{"a": 1}]})
    assert read_table([first, second])["n"].to_pylist() == [None, {"a": 1}]


def test_integers_are_never_rounded_to_go_with_another_file(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet", {"prompt": ["x"], "n": [0.5]})
    second = write(tmp_path / "2.parquet", {"prompt": ["y"], "n": [2**53 + 1]})
    with pytest.raises(UsageError, match="2.parquet.*9007199254740993"):
        read_rows([first, second])


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    first = write(tmp_path / "1.parquet", {"prompt": ["x"], "n": [1]})
    second = write(tmp_path / "2.parquet", {"prompt": ["y"], "n": [["a"]]})
    with pytest.raises(UsageError, match="2.parquet does not go with .*1.parquet"):
        open_inputs([first, second])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(UsageError, match="more than one column 'x'"):
        open_inputs(write(tmp_path / "a.parquet", twice))
    with pytest.raises(UsageError, match="no columns"):
        open_inputs(write(tmp_path / "b.parquet", pa.table({})))
    for name, data in (("c", b""), ("d", b"PAR1"), ("e", b"hello")):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(data)
        with pytest.raises(UsageError, match=f"cannot read .*{name}.parquet"):
            open_inputs(path)


def test_a_corrupt_page_ends_the_run_after_the_rows_before_it(tmp_path: Path) -> None:
    table = {"prompt": [f"{i * 0x9E3779B97F4A7C15:x}" for i in range(20_000)]}
    path = write(
        tmp_path / "a.parquet",
        table,
        row_group_size=5000,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    data = bytearray(path.read_bytes())
    # A digit that becomes another: nothing but the checksum can tell.
    data[data.index(table["prompt"][12_000].encode())] ^= 1
    path.write_bytes(data)
    source = open_inputs(path)
    num_read = 0
    with pytest.raises(UsageError, match="cannot read .*a.parquet"):
        for _ in source.rows(choose(source)):
            num_read += 1
    assert num_read >= 5000


def test_answers_of_an_earlier_run_are_an_ordinary_input(tmp_path: Path) -> None:
    """A column that was ours is the input's now; that a column holds JSON stays true."""
    schema = pa.schema(
        [
            ("prompt", pa.string()),
            json_field("payload"),
            pa.field("cbatch_extra", pa.string(), metadata={EXTRA_KEY: b"all"}),
        ]
    )
    table = pa.table([["x"], ["{}"], ['{"a":1}']], schema=schema)
    path = write(tmp_path / "a.parquet", table)
    read = read_table([path, path])
    assert read.schema.names == ["prompt", "payload", "cbatch_extra", "source_file"]
    assert read["cbatch_extra"].to_pylist() == ['{"a":1}'] * 2
    assert read.schema.field("payload").metadata == {JSON_KEY: b"1"}
    assert not read.schema.field("cbatch_extra").metadata


def test_selected_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"prompt": ["x"], "a": [1]})
    with pytest.raises(UsageError, match="'c'.*'prompt', 'a'"):
        open_inputs(path, columns="c")


def test_arrow_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    count = 40_000
    table = {
        "prompt": [f"{i:0200d}" for i in range(count)],
        "day": [datetime.date(2024, 1, 1)] * count,
    }
    path = write(tmp_path / "a.parquet", table, row_group_size=10_000, use_dictionary=False)
    before = pa.total_allocated_bytes()
    source = open_inputs(path)
    assert isinstance(source, ParquetSource)
    peak = 0
    for row in source.rows(choose(source)):
        if row.index % 100 == 0:
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < 6_000_000
