"""What can be read back from a journal, whatever a crash made of its files."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch_cli.data.journal_records import (
    MAGIC,
    JournaledPartial,
    JournaledResult,
    JournalEntry,
    encode_record,
    read_segment,
    segment_name,
    segment_number,
)
from cbatch_cli.data.journal_replay import replay
from cbatch_cli.data.row import RowResult
from cbatch_cli.errors import OutputError, RowError, RowErrorType
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason
from tests.data.output_fakes import make_result, make_row

text = st.text(st.characters(codec="utf-8"), max_size=40)
seconds = st.none() | st.floats(0, 1e6)
times = st.none() | st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
counts = st.integers(0, 2**31 - 1)
token_ids = st.lists(counts, max_size=9).map(tuple)
metrics = st.builds(
    RequestMetrics,
    prompt_tokens=counts,
    completion_tokens=counts,
    attempt=counts,
    queue_s=seconds,
    itl_p99_s=seconds,
    started_at=times,
    finished_at=times,
    worker=text,
)
errors = st.builds(RowError, st.sampled_from(RowErrorType), text)
results = st.builds(
    RowResult,
    row_index=st.integers(0, 2**62),
    completion=st.none() | text,
    finish_reason=st.sampled_from(FinishReason),
    error=st.none() | errors,
    metrics=metrics,
    token_ids=st.none() | token_ids,
)
hashes = st.binary(min_size=16, max_size=16)
entries = st.builds(JournaledResult, content_hash=hashes, result=results) | st.builds(
    JournaledPartial,
    row_index=st.integers(0, 2**62),
    content_hash=hashes,
    token_ids=token_ids,
    attempt=counts,
)


def result_entry(index: int, completion: str | None = None) -> JournaledResult:
    row = make_row(index)
    result = make_result(row)
    if completion is not None:
        result = replace(result, completion=completion)
    return JournaledResult(content_hash=index.to_bytes(16, "big"), result=result)


def partial_entry(index: int, *ids: int, attempt: int = 1) -> JournaledPartial:
    content_hash = index.to_bytes(16, "big")
    return JournaledPartial(
        row_index=index, content_hash=content_hash, token_ids=ids, attempt=attempt
    )


def write_segment(folder: Path, number: int, stored: Sequence[JournalEntry]) -> Path:
    path = folder / segment_name(number)
    path.write_bytes(MAGIC + b"".join(map(encode_record, stored)))
    return path


def read(path: Path) -> list[JournalEntry]:
    return [stored.entry for stored in read_segment(path)]


@settings(deadline=None)
@given(stored=st.lists(entries, max_size=5))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, stored: list[JournalEntry]
) -> None:
    path = write_segment(tmp_path_factory.mktemp("journal"), 1, stored)

    assert read(path) == stored


@settings(deadline=None)
@given(data=st.data(), stored=st.lists(entries, min_size=1, max_size=5))
def test_a_damaged_segment_gives_the_records_before_the_damage(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, stored: list[JournalEntry]
) -> None:
    path = write_segment(tmp_path_factory.mktemp("journal"), 1, stored)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1), label="at")
    damage = data.draw(st.sampled_from(["cut", "zeros", "garbage", "flip"]), label="damage")
    match damage:
        case "cut":
            damaged = whole[:at]
        case "zeros":
            damaged = whole[:at] + bytes(data.draw(st.integers(1, 5000)))
        case "garbage":
            seed = data.draw(st.integers(0, 2**32))
            damaged = whole[:at] + random.Random(seed).randbytes(data.draw(st.integers(1, 5000)))
        case _:
            mask = data.draw(st.integers(1, 255))
            damaged = whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]
    path.write_bytes(damaged)

    ends = [len(MAGIC)]
    for entry in stored:
        ends.append(ends[-1] + len(encode_record(entry)))
    # What was drawn may happen to be what stood there.
    num_equal = next(
        (i for i, (a, b) in enumerate(zip(whole, damaged, strict=False)) if a != b),
        min(len(whole), len(damaged)),
    )
    num_intact = sum(end <= num_equal for end in ends[1:])
    assert read(path) == stored[:num_intact]


@given(garbage=st.binary(max_size=300), with_magic=st.booleans())
def test_garbage_alone_is_no_record(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, with_magic: bool
) -> None:
    path = tmp_path_factory.mktemp("journal") / segment_name(1)
    path.write_bytes(MAGIC * with_magic + garbage)

    assert read(path) == []


@pytest.mark.parametrize(
    "payload",
    [
        *[b"[]", b"{}", b"null", b'{"kind":"result"}', b'{"kind":"other","content_hash":""}'],
        b'{"kind":"partial","content_hash":"zz"}',
        b'{"kind":"partial","content_hash":"","row_index":1,"attempt":1,"token_ids":null}',
    ],
)
def test_a_record_that_makes_no_sense_ends_the_segment(tmp_path: Path, payload: bytes) -> None:
    path = write_segment(tmp_path, 1, [result_entry(1)])
    checksum = zlib.crc32(payload)
    header = len(payload).to_bytes(4, "little") + checksum.to_bytes(4, "little")
    with path.open("ab") as file:
        file.write(header + payload + encode_record(result_entry(2)))

    assert read(path) == [result_entry(1)]


def test_a_record_is_its_length_its_checksum_and_json() -> None:
    record = encode_record(partial_entry(5, 1, 2, attempt=3))

    assert int.from_bytes(record[:4], "little") == len(record) - 8
    assert int.from_bytes(record[4:8], "little") == zlib.crc32(record[8:])
    assert record[8:] == (
        b'{"kind":"partial","row_index":5,"content_hash":"00000000000000000000000000000005",'
        b'"attempt":3,"token_ids":[1,2]}'
    )


def test_what_json_cannot_hold_does_not_lose_the_row(tmp_path: Path) -> None:
    entry = result_entry(0, "half \ud83d")
    result = replace(
        entry.result,
        error=RowError(RowErrorType.BAD_TYPE, "\udcff"),
        metrics=RequestMetrics(itl_mean_s=math.nan),
    )
    path = write_segment(tmp_path, 1, [replace(entry, result=result)])

    (read_back,) = read(path)
    assert isinstance(read_back, JournaledResult)
    assert read_back.result.completion == "half ?"
    assert read_back.result.error == RowError(RowErrorType.BAD_TYPE, "?")
    assert read_back.result.metrics == RequestMetrics(itl_mean_s=None)


def test_segments_are_read_in_their_order_and_damage_stays_in_its_segment(tmp_path: Path) -> None:
    numbers = [1, 2, 10, 999_999, 1_000_000]
    for number in reversed(numbers):
        path = write_segment(tmp_path, number, [result_entry(number), result_entry(number + 1)])
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / segment_name(3)).write_bytes(b"")
    (tmp_path / "run.json").write_bytes(b"{}")

    replayed = replay(tmp_path)

    assert [segment.number for segment in replayed.segments] == sorted([*numbers, 3])
    assert sorted(replayed.results) == numbers
    assert all(replayed.result(number) == result_entry(number) for number in numbers)
    assert replayed.result(5) is None


def test_the_first_result_of_a_row_wins(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [result_entry(1, "first"), result_entry(1, "again")])
    write_segment(tmp_path, 2, [result_entry(1, "later"), result_entry(2, "only")])

    replayed = replay(tmp_path)

    assert replayed.result(1) == result_entry(1, "first")
    assert replayed.result(2) == result_entry(2, "only")
    assert [segment.rows for segment in replayed.segments] == [{1}, {1, 2}]


def test_the_last_partial_of_an_unfinished_row_counts(tmp_path: Path) -> None:
    write_segment(tmp_path, 1, [partial_entry(1, 7), partial_entry(2, 8), result_entry(4)])
    later = partial_entry(1, 7, 9, attempt=2)
    write_segment(tmp_path, 2, [later, result_entry(2), partial_entry(4, 5)])

    replayed = replay(tmp_path)

    assert replayed.partials == {1: later}
    assert sorted(replayed.results) == [2, 4]
    assert [segment.rows for segment in replayed.segments] == [{1, 2, 4}, {1, 2, 4}]


def test_a_failed_row_that_is_tried_again_may_be_interrupted_and_may_succeed(
    tmp_path: Path,
) -> None:
    failed = result_entry(3)
    assert failed.result.error is not None
    again = partial_entry(3, 5)
    write_segment(tmp_path, 1, [partial_entry(3, 4), failed, again])
    replayed = replay(tmp_path)
    assert replayed.partials == {3: again} and replayed.result(3) == failed

    answer = JournaledResult(
        content_hash=failed.content_hash,
        result=replace(result_entry(4).result, row_index=3),
    )
    write_segment(tmp_path, 2, [answer, failed])
    replayed = replay(tmp_path)
    assert replayed.partials == {} and replayed.result(3) == answer


def test_a_result_that_is_gone_when_it_is_asked_for_is_an_error(tmp_path: Path) -> None:
    path = write_segment(tmp_path, 1, [result_entry(1)])
    replayed = replay(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(OutputError, match="has changed"):
        replayed.result(1)
    path.unlink()
    with pytest.raises(OutputError, match=f"cannot read {path}"):
        replayed.result(1)


def test_only_our_names_are_segments() -> None:
    assert segment_name(7) == "journal-000007.bin"
    assert segment_number("journal-000007.bin") == 7
    assert segment_number("journal-1234567.bin") == 1234567
    for name in ("journal-7.bin", "journal-000007.bin.tmp", "xjournal-000007.bin", "run.json"):
        assert segment_number(name) is None
