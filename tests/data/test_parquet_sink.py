"""The sink: every row once, in input order, in files that are whole whenever they can be seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.data import parquet_sink, part_buffer
from cbatch_cli.data.output_schema import output_schema
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.errors import CBatchError
from tests.data.output_fakes import (
    PASSTHROUGH,
    expected_rows,
    fill,
    make_result,
    make_row,
    make_sink,
    read_rows,
    write_rows,
)

NUM_ROWS = 10
ORDER = (9, 4, 1, 0, 8, 2, 3, 7, 6, 5)


def file_target(folder: Path) -> OutputTarget:
    return OutputTarget(path=folder / "out.parquet", is_directory=False)


def folder_target(folder: Path) -> OutputTarget:
    return OutputTarget(path=folder / "out", is_directory=True)


@pytest.fixture(params=[file_target, folder_target], ids=["file", "folder"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> OutputTarget:
    made: OutputTarget = request.param(tmp_path)
    return made


def run_metadata(path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(pq.read_metadata(path).metadata[b"cbatch.run"])
    return metadata


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    num_rows=st.integers(0, 23),
    rows_per_part=st.integers(1, 9),
    row_group_rows=st.integers(1, 4),
    max_raw_bytes=st.sampled_from([0, 8_000, 2**30]),
    max_arrow_bytes=st.sampled_from([0, 3_000, 2**30]),
    is_directory=st.booleans(),
)
def test_any_order_of_arrival_gives_input_order(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    num_rows: int,
    rows_per_part: int,
    row_group_rows: int,
    max_raw_bytes: int,
    max_arrow_bytes: int,
    is_directory: bool,
) -> None:
    order = data.draw(st.permutations(range(num_rows)))
    folder = tmp_path_factory.mktemp("sink")
    target = (folder_target if is_directory else file_target)(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_buffer, "ROW_GROUP_ROWS", row_group_rows)
        patch.setattr(parquet_sink, "MAX_RAW_BYTES", max_raw_bytes)
        patch.setattr(parquet_sink, "MAX_ARROW_BYTES", max_arrow_bytes)
        path = write_rows(target, order, rows_per_part=rows_per_part)

    assert read_rows(path) == expected_rows(num_rows)
    assert os.listdir(target.work_dir) == []
    assert sorted(os.listdir(folder)) == sorted([path.name, target.work_dir.name])
    if is_directory:
        num_parts = max(-(-num_rows // rows_per_part), 1)
        assert sorted(os.listdir(path)) == [f"part-{i:05d}.parquet" for i in range(num_parts)]
        for number, name in enumerate(sorted(os.listdir(path))):
            start = number * rows_per_part
            stop = min(start + rows_per_part, num_rows)
            assert pq.read_table(path / name)["row_index"].to_pylist() == [*range(start, stop)]


def test_the_readers_of_the_world_agree(target: OutputTarget, tmp_path: Path) -> None:
    path = write_rows(target, ORDER)
    files = str(path / "*.parquet") if target.is_directory else str(path)
    completions = [row["completion"] for row in expected_rows(NUM_ROWS)]

    assert read_rows(path) == expected_rows(NUM_ROWS)
    query = f"select row_index, completion, error.type, metrics.worker from '{files}' order by 1"
    assert [row[1] for row in duckdb.sql(query).fetchall()] == completions
    frame = polars.read_parquet(path)
    assert frame["row_index"].to_list() == list(range(NUM_ROWS))
    assert frame["completion"].to_list() == completions
    assert frame["always_null"].dtype == polars.String
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded["row_index"] == list(range(NUM_ROWS))
    assert loaded["completion"] == completions
    assert loaded[3]["error"]["type"] == "invalid_json"


def test_an_empty_input_gives_an_empty_file(target: OutputTarget) -> None:
    path = write_rows(target, [])
    files = str(path / "*.parquet") if target.is_directory else str(path)

    assert pq.read_table(path).schema.equals(output_schema(PASSTHROUGH))
    assert pq.read_table(path).num_rows == 0
    assert duckdb.sql(f"select count(*) from '{files}'").fetchall() == [(0,)]
    assert polars.read_parquet(path).is_empty()


def test_the_schema_of_a_part_does_not_depend_on_its_values(tmp_path: Path) -> None:
    """Rows 3 and 10 hold nothing but an error; each is a part of its own."""
    path = write_rows(folder_target(tmp_path), range(11), rows_per_part=1)

    schemas = [pq.read_schema(part).remove_metadata() for part in sorted(path.iterdir())]

    assert len(schemas) == 11
    assert all(schema.equals(output_schema(PASSTHROUGH)) for schema in schemas)


def test_files_are_compressed_checked_and_grouped(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_buffer, "ROW_GROUP_ROWS", 3)
    path = write_rows(target, ORDER, rows_per_part=NUM_ROWS)
    file = path / "part-00000.parquet" if target.is_directory else path

    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [3, 3, 3, 1]
    assert {group.column(i).compression for group in groups for i in range(20)} == {"ZSTD"}
    data = bytearray(file.read_bytes())
    column = groups[0].column(0)
    end = column.dictionary_page_offset + column.total_compressed_size
    data[end - 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(file, page_checksum_verification=True).read()


def test_the_file_knows_its_run(tmp_path: Path) -> None:
    path = write_rows(file_target(tmp_path), ORDER)

    assert run_metadata(path) == {"stage": "end", "rows": 1}


@pytest.mark.parametrize("num_rows", [0, 3, 8, 10])
def test_the_last_part_of_a_folder_knows_the_totals(tmp_path: Path, num_rows: int) -> None:
    """Also where the last part was full, and so in its place, before the run ended."""
    path = write_rows(folder_target(tmp_path), range(num_rows), rows_per_part=4)

    *others, last = [run_metadata(part) for part in sorted(path.iterdir())]
    assert last == {"stage": "end", "rows": 1}
    assert all(other == {"stage": "start"} for other in others)
    assert read_rows(path) == expected_rows(num_rows)


def test_a_part_is_told_durable_once_it_is_in_place(target: OutputTarget) -> None:
    told: list[range] = []

    def on_part_durable(rows: range) -> None:
        stored = pq.read_table(target.part_path(rows.start // 4))
        assert stored["row_index"].to_pylist() == list(rows)
        told.append(rows)

    sink = make_sink(target, on_part_durable=on_part_durable)
    fill(sink, (9, 4, 6, 5, 0, 8))
    assert told == []
    fill(sink, [7])
    assert told == [range(4, 8)]
    fill(sink, (3, 1, 2))
    assert told == [range(4, 8), range(0, 4)]
    sink.finish({})

    assert told == [range(4, 8), range(0, 4), range(8, 10)]


def test_only_a_folder_shows_parts_before_the_end(target: OutputTarget) -> None:
    sink = make_sink(target)
    fill(sink, range(9))

    if target.is_directory:
        assert sorted(os.listdir(target.path)) == ["part-00000.parquet", "part-00001.parquet"]
        assert read_rows(target.path) == expected_rows(8)
        assert os.listdir(target.work_dir) == []
    else:
        assert not target.path.exists()
    sink.abort()


@pytest.mark.parametrize("order", [[1], [0, 1, 2, 3, 5], [0, 1, 2, 8], [4, 5, 6, 7], [0, 8]])
def test_a_missing_row_is_never_passed_over(target: OutputTarget, order: list[int]) -> None:
    sink = make_sink(target)
    fill(sink, order)

    with pytest.raises(CBatchError, match="never finished"):
        sink.finish({})

    assert target.is_directory or not target.path.exists()


def test_a_row_is_taken_once(target: OutputTarget) -> None:
    sink = make_sink(target)
    fill(sink, (0, 1, 2, 3, 5))

    for index in (5, 1):
        with pytest.raises(ValueError, match=f"row {index} is finished twice"):
            fill(sink, [index])
    sink.abort()


def test_a_slow_row_does_not_hold_the_rest_in_memory(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 of every part is late: what waits for it goes through Arrow to scratch files."""
    monkeypatch.setattr(parquet_sink, "MAX_RAW_BYTES", 100_000)
    monkeypatch.setattr(parquet_sink, "MAX_ARROW_BYTES", 200_000)
    rows_per_part, num_parts = 50, 20
    sink = make_sink(target, rows_per_part=rows_per_part)
    num_rows = rows_per_part * num_parts
    before = pa.total_allocated_bytes()
    most = 0
    for index in range(num_rows):
        if index % rows_per_part:
            row = make_row(index, text_bytes=20_000)
            sink.add(row, make_result(row))
            most = max(most, pa.total_allocated_bytes() - before)
    assert most < 1_000_000 < num_rows * 15_000
    assert len(os.listdir(target.work_dir)) == num_parts

    fill(sink, range(0, num_rows, rows_per_part))
    path = sink.finish({})

    assert pq.read_table(path)["row_index"].to_pylist() == list(range(num_rows))
    assert os.listdir(target.work_dir) == []


def test_what_stood_there_is_read_until_the_new_file_is_whole(tmp_path: Path) -> None:
    target = file_target(tmp_path)
    write_rows(target, range(3))
    sink = make_sink(target)
    fill(sink, ORDER)
    assert read_rows(target.path) == expected_rows(3)

    sink.finish({})

    assert read_rows(target.path) == expected_rows(NUM_ROWS)
