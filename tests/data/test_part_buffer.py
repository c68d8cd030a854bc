"""Finished rows of a part that is still open."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.data import part_buffer
from cbatch_cli.data.output_schema import FinishedRow, output_schema, to_record_batch
from cbatch_cli.data.part_buffer import PartBuffer
from cbatch_cli.data.row import ArrowRow
from cbatch_cli.errors import OutputError
from tests.data.output_fakes import (
    PASSTHROUGH,
    PlainEncoder,
    expected_rows,
    make_result,
    make_row,
)

SCHEMA = output_schema(PASSTHROUGH)
encode = partial(to_record_batch, schema=SCHEMA, encoder=PlainEncoder(PASSTHROUGH))


def finished_row(index: int, *, text_bytes: int = 0) -> FinishedRow:
    row = make_row(index, text_bytes=text_bytes)
    return FinishedRow(row, make_result(row))


def read(buffer: PartBuffer) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pa.concat_tables(buffer.row_groups()).to_pylist()
    return rows


@settings(deadline=None)
@given(
    order=st.permutations(range(14)),
    acts=st.lists(st.sampled_from(["none", "compact", "spill"]), min_size=14, max_size=14),
    row_group_rows=st.integers(1, 14),
)
def test_rows_come_back_in_input_order_from_whatever_form_they_took(
    tmp_path_factory: pytest.TempPathFactory,
    order: Sequence[int],
    acts: Sequence[str],
    row_group_rows: int,
) -> None:
    scratch = tmp_path_factory.mktemp("buffer") / "scratch"
    buffer = PartBuffer(rows=range(14), encode=encode, scratch=scratch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_buffer, "ROW_GROUP_ROWS", row_group_rows)
        for index, act in zip(order, acts, strict=True):
            assert not buffer.is_complete
            buffer.add(finished_row(index))
            if act != "none":
                buffer.compact()
                assert buffer.raw_bytes == 0
            if act == "spill":
                buffer.spill()
                assert buffer.arrow_bytes == 0
        assert buffer.is_complete
        assert scratch.exists() == ("spill" in acts)
        sizes = [table.num_rows for table in buffer.row_groups()]
        assert read(buffer) == expected_rows(14)
    assert all(size == row_group_rows for size in sizes[:-1])
    assert sum(sizes) == 14
    buffer.discard()
    assert not scratch.exists()


def test_a_row_group_ends_at_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_buffer, "ROW_GROUP_BYTES", 100_000)
    texts = {0: 10, 1: 10, 2: 99_000, 4: 250_000, 5: 10, 6: 10}
    buffer = PartBuffer(rows=range(0, 7), encode=encode, scratch=tmp_path / "scratch")
    for index in random.Random(0).sample(range(7), 7):
        buffer.add(finished_row(index, text_bytes=texts.get(index, 0)))

    groups = [table["row_index"].to_pylist() for table in buffer.row_groups()]

    assert groups == [[0, 1], [2], [3], [4], [5, 6]]


def test_what_a_row_keeps_in_memory_counts(tmp_path: Path) -> None:
    plain, text, arrow = (
        PartBuffer(rows=range(1), encode=encode, scratch=tmp_path / "scratch") for _ in range(3)
    )
    row = make_row(0)
    plain.add(finished_row(0))
    text.add(finished_row(0, text_bytes=5000))
    pointer = ArrowRow(pa.record_batch({"x": [1]}), 0, 5000)
    arrow.add(FinishedRow(replace(row, arrow=pointer), make_result(row)))

    assert text.raw_bytes == plain.raw_bytes + 5000
    assert arrow.raw_bytes == plain.raw_bytes + 5000


def test_a_range_that_does_not_start_at_zero_and_a_short_end(tmp_path: Path) -> None:
    buffer = PartBuffer(rows=range(10, 20), encode=encode, scratch=tmp_path / "scratch")
    for index in (12, 10):
        buffer.add(finished_row(index))
    assert buffer.has_gap
    buffer.add(finished_row(11))

    assert not buffer.has_gap
    assert not buffer.is_complete
    assert read(buffer) == expected_rows(13)[10:]


def test_a_row_is_taken_once_and_only_in_its_part(tmp_path: Path) -> None:
    buffer = PartBuffer(rows=range(10, 20), encode=encode, scratch=tmp_path / "scratch")
    buffer.add(finished_row(12))
    buffer.compact()

    with pytest.raises(ValueError, match="row 12 is finished twice"):
        buffer.add(finished_row(12))
    with pytest.raises(ValueError):
        buffer.add(finished_row(20))


def test_a_damaged_scratch_is_an_output_error(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    buffer = PartBuffer(rows=range(2), encode=encode, scratch=scratch)
    buffer.add(finished_row(0))
    buffer.compact()
    buffer.spill()
    scratch.write_bytes(b"?" * scratch.stat().st_size)

    with pytest.raises(OutputError, match=f"cannot read back {scratch}"):
        read(buffer)
