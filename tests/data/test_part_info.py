"""What a part says of itself, as a resumed run reads it from the file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.part_info import PartInfo, RowsHash, find_parts, read_part_info
from cbatch_cli.data.row import InputPosition
from tests.data.output_fakes import make_result, make_row, make_sink


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> OutputTarget:
    name = "out" if request.param else "out.parquet"
    return OutputTarget(path=tmp_path / name, is_directory=request.param)


def write_parts(target: OutputTarget, *, with_end: bool) -> None:
    """Two whole parts and a row of a third."""
    sink = make_sink(target)
    for index in range(9):
        row = make_row(index)
        end = InputPosition(1, 100 * index) if with_end else None
        sink.add(replace(row, end=end), make_result(row))
    sink.abort()


@pytest.mark.parametrize("with_end", [False, True])
def test_parts_are_found_with_all_that_they_say(target: OutputTarget, with_end: bool) -> None:
    assert find_parts(target) == {}
    write_parts(target, with_end=with_end)

    rows_hash = RowsHash()
    for index in range(4, 8):
        rows_hash.add(make_row(index).content_hash)
    parts = find_parts(target)
    assert sorted(parts) == [0, 1]
    assert parts[1] == PartInfo(
        rows=range(4, 8),
        rows_hash=rows_hash.hexdigest(),
        end=InputPosition(1, 700) if with_end else None,
        errors=Counter(),
    )
    assert parts[0].rows == range(0, 4)
    assert parts[0].errors == {"invalid_json": 1}


def test_a_part_with_any_byte_of_a_page_changed_is_not_taken(tmp_path: Path) -> None:
    target = OutputTarget(path=tmp_path / "out.parquet", is_directory=False)
    write_parts(target, with_end=True)
    path = target.part_path(0)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    assert read_part_info(path) is not None
    group = pq.read_metadata(path).row_group(0)
    for number in range(group.num_columns):
        chunk = group.column(number)
        last = chunk.data_page_offset + chunk.total_compressed_size - 1
        if chunk.dictionary_page_offset is not None:
            last = chunk.dictionary_page_offset + chunk.total_compressed_size - 1
        path.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
        assert read_part_info(path) is None, chunk.path_in_schema
    for size in (0, 3, len(whole) - footer, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_part_info(path) is None
    assert sorted(find_parts(target)) == [1]


def test_a_file_of_somebody_else_is_no_part(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pq.ParquetFile(_some_file(tmp_path)).read(), path)
    pq.write_table(pq.read_table(path).replace_schema_metadata({"cbatch.part": "{}"}), path)
    assert read_part_info(path) is None
    assert read_part_info(tmp_path / "absent.parquet") is None


def _some_file(folder: Path) -> Path:
    import pyarrow as pa

    path = folder / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    return path
