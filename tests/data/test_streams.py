from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.streams import DECOMPRESSED_BYTES, ReadProgress, open_stream
from cbatch_cli.errors import UsageError

LINES = b"".join(b'{"prompt": "row %d"}\n' % i for i in range(20_000))
SKIPPABLE_FRAME = b"\x5a\x2a\x4d\x18\x04\x00\x00\x00abcd"

Compress = Callable[[bytes], bytes]
CODECS: dict[str, Compress] = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
codecs = pytest.mark.parametrize(("suffix", "compress"), CODECS.items(), ids=CODECS)


def write(path: Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    return InputFile(str(path), str(path))


def read(file: InputFile) -> bytes:
    with open_stream(file) as (stream, _):
        return stream.read()


def test_plain(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", LINES)) == LINES
    assert read(write(tmp_path / "empty.jsonl", b"")) == b""


@codecs
def test_told_by_suffix_or_by_magic_bytes(tmp_path: Path, suffix: str, compress: Compress) -> None:
    data = compress(LINES)
    assert read(write(tmp_path / f"a.jsonl{suffix}", data)) == LINES
    assert read(write(tmp_path / "a.jsonl", data)) == LINES
    assert read(write(tmp_path / f"A.JSONL{suffix.upper()}", data)) == LINES


@codecs
def test_several_members_are_one_stream(tmp_path: Path, suffix: str, compress: Compress) -> None:
    parts = [LINES[:1000], b"", LINES[1000:5000], LINES[5000:]]
    data = b"".join(compress(part) for part in parts)
    assert read(write(tmp_path / f"a.jsonl{suffix}", data)) == LINES


def test_zstd_skippable_frames(tmp_path: Path) -> None:
    compress = CODECS[".zst"]
    data = SKIPPABLE_FRAME + compress(LINES) + SKIPPABLE_FRAME + compress(LINES)
    assert read(write(tmp_path / "a.jsonl", data)) == LINES + LINES


@codecs
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_cut_short_gives_its_rows_and_then_an_error(
    tmp_path: Path, suffix: str, compress: Compress, share: float
) -> None:
    data = compress(LINES[:100_000]) + compress(LINES[100_000:])
    file = write(tmp_path / f"a.jsonl{suffix}", data[: int(len(data) * share)])
    found = []
    error = pytest.raises(UsageError, match=f"cannot read .*a.jsonl{suffix}: ")
    with error, open_stream(file) as (stream, _):
        for line in stream:
            found.append(line)
    assert LINES.startswith(b"".join(found))
    # All whole lines of the first member; of zstd, all but what one call decompresses.
    lost = DECOMPRESSED_BYTES if suffix == ".zst" else 0
    assert share < 0.5 or sum(map(len, found)) > 100_000 - lost - 30


@codecs
def test_corrupt_data_is_an_error(tmp_path: Path, suffix: str, compress: Compress) -> None:
    data = bytearray(compress(LINES))
    middle = len(data) // 2
    data[middle : middle + 50] = bytes(byte ^ 0xFF for byte in data[middle : middle + 50])
    with pytest.raises(UsageError, match="cannot read"):
        read(write(tmp_path / f"a.jsonl{suffix}", bytes(data)))


@codecs
def test_a_suffix_that_lies_is_an_error(tmp_path: Path, suffix: str, compress: Compress) -> None:
    with pytest.raises(UsageError, match=f"a.jsonl{suffix}"):
        read(write(tmp_path / f"a.jsonl{suffix}", LINES))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_utf16_is_refused(tmp_path: Path, encoding: str, compress: Compress) -> None:
    text = "\ufeff" + LINES.decode() if encoding.endswith("be") else LINES.decode()
    with pytest.raises(UsageError, match="UTF-16"):
        read(write(tmp_path / "a.jsonl", compress(text.encode(encoding))))


def test_a_bomb_is_read_in_constant_memory(tmp_path: Path) -> None:
    data = zstandard.ZstdCompressor().compress(bytes(256 * 2**20))
    file = write(tmp_path / "a.jsonl.zst", data)
    before = pa.total_allocated_bytes()
    length = 0
    with open_stream(file) as (stream, _):
        while chunk := stream.read(2**20):
            length += len(chunk)
            assert pa.total_allocated_bytes() - before < 2 * 2**20
    assert length == 256 * 2**20


def test_files_are_closed(tmp_path: Path) -> None:
    for suffix, compress in CODECS.items():
        file = write(tmp_path / f"a.jsonl{suffix}", compress(LINES))
        with open_stream(file) as (stream, counter):
            stream.readline()
        assert stream.closed
        assert counter.closed
    with pytest.raises(KeyError), open_stream(file) as (stream, counter):
        raise KeyError
    assert counter.closed


def test_a_file_that_has_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone.jsonl"):
        read(InputFile("gone.jsonl", str(tmp_path / "gone.jsonl")))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_progress_counts_bytes_as_they_lie_on_disk(tmp_path: Path, compress: Compress) -> None:
    files = [write(tmp_path / f"{i}.jsonl", compress(LINES * 10)) for i in range(2)]
    progress = ReadProgress(files)
    seen = [progress.fraction]
    for file in files:
        with progress.open(file) as stream:
            while stream.read(100_000):
                seen.append(progress.fraction)
        seen.append(progress.fraction)
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert any(0.1 < fraction < 0.45 for fraction in seen)
    assert any(0.6 < fraction < 0.95 for fraction in seen)
    assert seen[-1] == 1.0
    progress.restart()
    assert progress.fraction == 0.0


def test_progress_without_sizes_counts_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / f"{i}.jsonl", LINES) for i in range(2)]
    monkeypatch.setattr(InputFile, "size", lambda self: None)
    progress = ReadProgress(files)
    with progress.open(files[0]) as stream:
        stream.read()
        assert progress.fraction == 0.0
    assert progress.fraction == 0.5


def test_empty_files_are_read_at_once(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", b"")]
    progress = ReadProgress(files)
    with progress.open(files[0]) as stream:
        assert stream.read() == b""
        assert isinstance(stream, io.BufferedReader)
    assert progress.fraction == 1.0
