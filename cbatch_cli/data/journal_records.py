"""What a journal segment holds, byte by byte.

A segment is a magic, then records of `[u32 length][u32 crc32][payload]`, little endian, where the
payload is a JSON object and the checksum is the payload's. A record is whole or it is not there:
reading stops at the first one that is cut short, fails its checksum or makes no sense, since what
follows it cannot be told from garbage.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from cbatch_cli.data.json_text import valid_unicode
from cbatch_cli.data.row import RowResult
from cbatch_cli.errors import OutputError, RowError, RowErrorType
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason

MAGIC = b"cbatch-journal-1\n"
SEGMENT_NAME = re.compile(r"journal-(\d{6,})\.bin")

_HEADER = struct.Struct("<II")
_TIMES = ("started_at", "finished_at")


@dataclass(frozen=True, kw_only=True, slots=True)
class JournaledResult:
    """A finished row; `content_hash` tells whether it is still the row that was asked."""

    content_hash: bytes
    result: RowResult

    @property
    def row_index(self) -> int:
        """Index of the row."""
        return self.result.row_index


@dataclass(frozen=True, kw_only=True, slots=True)
class JournaledPartial:
    """The output ids that a row had when its run was interrupted, in its attempt `attempt`."""

    row_index: int
    content_hash: bytes
    token_ids: tuple[int, ...]
    attempt: int


JournalEntry = JournaledResult | JournaledPartial


class StoredEntry(NamedTuple):
    """An entry and where its record starts in the segment."""

    offset: int
    entry: JournalEntry


def encode_record(entry: JournalEntry) -> bytes:
    """The bytes of one record."""
    fields = _result_fields(entry) if isinstance(entry, JournaledResult) else _partial_fields(entry)
    payload = orjson.dumps(fields)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"journal-{number:06d}.bin"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; None for any other name."""
    match = SEGMENT_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def read_segment(path: Path) -> Iterator[StoredEntry]:
    """The entries of a segment up to its end or its first bad record.

    Raises `OutputError` if the file cannot be read at all.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(MAGIC)) != MAGIC:
                return
            offset = len(MAGIC)
            while (payload := _read_payload(file.read, size - offset)) is not None:
                try:
                    # Zeros, which some file systems leave behind a crash, are the header of a
                    # record of no bytes: it comes as far as here.
                    entry = _decode(payload)
                except (ValueError, TypeError, KeyError):
                    return
                yield StoredEntry(offset, entry)
                offset += _HEADER.size + len(payload)
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror or error}") from error


def read_entry(path: Path, offset: int) -> JournalEntry:
    """The entry whose record starts at `offset`. Raises `OutputError` if it is gone."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            payload = _read_payload(file.read, size - offset)
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror or error}") from error
    if payload is None:
        raise OutputError(f"{path} has changed: the record at byte {offset} is gone")
    return _decode(payload)


def _read_payload(read: Callable[[int], bytes], num_bytes_left: int) -> bytes | None:
    header = read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, checksum = _HEADER.unpack(header)
    if length > num_bytes_left - _HEADER.size:
        return None
    payload = read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None


def _result_fields(entry: JournaledResult) -> dict[str, Any]:
    result = entry.result
    error = result.error
    return {
        "kind": "result",
        "row_index": result.row_index,
        "content_hash": entry.content_hash.hex(),
        "completion": None if result.completion is None else valid_unicode(result.completion),
        "finish_reason": result.finish_reason,
        "error": error and {"type": error.type, "message": valid_unicode(error.message)},
        "metrics": result.metrics,
        "token_ids": result.token_ids,
    }


def _partial_fields(entry: JournaledPartial) -> dict[str, Any]:
    return {
        "kind": "partial",
        "row_index": entry.row_index,
        "content_hash": entry.content_hash.hex(),
        "attempt": entry.attempt,
        "token_ids": entry.token_ids,
    }


def _decode(payload: bytes) -> JournalEntry:
    """Raises `ValueError`, `TypeError` or `KeyError` for a payload that is none of ours."""
    fields = orjson.loads(payload)
    content_hash = bytes.fromhex(fields["content_hash"])
    if fields["kind"] == "partial":
        return JournaledPartial(
            row_index=fields["row_index"],
            content_hash=content_hash,
            token_ids=tuple(fields["token_ids"]),
            attempt=fields["attempt"],
        )
    if fields["kind"] != "result":
        raise ValueError(f"unknown record kind {fields['kind']!r}")
    error = fields["error"]
    token_ids = fields["token_ids"]
    result = RowResult(
        row_index=fields["row_index"],
        completion=fields["completion"],
        finish_reason=FinishReason(fields["finish_reason"]),
        error=error and RowError(RowErrorType(error["type"]), error["message"]),
        metrics=_decode_metrics(fields["metrics"]),
        token_ids=None if token_ids is None else tuple(token_ids),
    )
    return JournaledResult(content_hash=content_hash, result=result)


def _decode_metrics(fields: Mapping[str, Any]) -> RequestMetrics:
    times = {name: fields[name] and datetime.fromisoformat(fields[name]) for name in _TIMES}
    return RequestMetrics(**{**fields, **times})
