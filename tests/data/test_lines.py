from __future__ import annotations

import io
import tracemalloc
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from cbatch_cli.data.lines import OverlongLine, read_lines


def lines(data: bytes, limit: int, *, buffer_bytes: int = 4096) -> list[bytes | OverlongLine]:
    stream = io.BufferedReader(io.BytesIO(data), buffer_bytes)  # type: ignore[arg-type]
    return list(read_lines(stream, limit))


contents = st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"x")), min_size=1)


@given(contents, st.integers(1, 8), st.booleans())
def test_every_line_comes_once_and_only_long_ones_are_skipped(
    contents: list[bytes], limit: int, has_final_end: bool
) -> None:
    data = b"\n".join(contents) + (b"\n" if has_final_end else b"")
    # After a line feed at the very end no further line begins.
    expected = contents if has_final_end or contents[-1] else contents[:-1]
    read = lines(data, limit, buffer_bytes=3)
    assert len(read) == len(expected)
    for line, content in zip(read, expected, strict=True):
        assert isinstance(line, OverlongLine) == (len(content) > limit)
        if isinstance(line, bytes):
            assert line.removesuffix(b"\n") == content


def test_a_line_at_the_limit_is_read_with_and_without_its_end() -> None:
    assert lines(b"12345\n12345", 5) == [b"12345\n", b"12345"]
    assert [type(line) for line in lines(b"123456\n123456", 5)] == [OverlongLine, OverlongLine]


def test_a_long_line_is_hashed_whole_and_the_next_one_is_read() -> None:
    data = b"x" * 1_000_000 + b"\n"
    first, second = lines(data + b"ok\n", 10)
    assert first == OverlongLine(blake2b(data, digest_size=16).digest(), len(data))
    assert second == b"ok\n"


def test_skipping_takes_constant_memory() -> None:
    class Endless(io.RawIOBase):
        left = 64 * 2**20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            count = min(len(buffer), self.left)
            buffer[:count] = bytes(count)
            self.left -= count
            return count

    stream = io.BufferedReader(Endless())
    tracemalloc.start()
    try:
        (line,) = read_lines(stream, 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(line, OverlongLine)
    assert line.num_bytes == 64 * 2**20
    assert peak < 4 * 2**20
