"""Lines of a byte stream, none longer than a limit, in constant memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 16
CHUNK_BYTES = 256 * 1024


class OverlongLine(NamedTuple):
    """A line that was passed over; its hash stands for its bytes."""

    content_hash: bytes
    num_bytes: int


def content_hash(data: bytes) -> bytes:
    """The 128-bit BLAKE2b of a row's raw bytes."""
    return blake2b(data, digest_size=HASH_BYTES).digest()


def read_lines(stream: io.BufferedReader, max_line_bytes: int) -> Iterator[bytes | OverlongLine]:
    """Each line with its line feed; one with more than `max_line_bytes` before it is skipped."""
    while line := stream.readline(max_line_bytes + 1):
        if len(line) <= max_line_bytes or line.endswith(b"\n"):
            yield line
        else:
            yield _skip(stream, line)


def _skip(stream: io.BufferedReader, start: bytes) -> OverlongLine:
    digest = blake2b(start, digest_size=HASH_BYTES)
    num_bytes = len(start)
    chunk = start
    while not chunk.endswith(b"\n") and (chunk := stream.readline(CHUNK_BYTES)):
        digest.update(chunk)
        num_bytes += len(chunk)
    return OverlongLine(digest.digest(), num_bytes)
