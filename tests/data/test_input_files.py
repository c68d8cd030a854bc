from __future__ import annotations

import gzip
import io
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch_cli.data.input_files import InputFile, expand_inputs, natural_key
from cbatch_cli.data.spool import discard_later_spools, discard_spools
from cbatch_cli.errors import UsageError
from tests.data.input_reading import open_inputs, read_rows, read_table

ROW = b'{"prompt": "x"}\n'


def names(*inputs: Path | str) -> list[str]:
    return [file.name for file in expand_inputs([str(name) for name in inputs], spool_dir=None)]


def touch(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(ROW)


def test_natural_order() -> None:
    ordered = [
        "a",
        "a1",
        "a1b",
        "a1b2",
        "a2",
        "a10",
        "a010x",
        "b/2/10",
        "b/10/2",
        "part-9",
        "part-10",
        "x",
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=natural_key) == ordered


def test_files_of_a_folder(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "part-10.jsonl",
        "part-9.jsonl",
        "part-9.jsonl.gz",
        "sub/1.ndjson",
        "B.JSONL",
        "c.json",
        # None of these holds rows.
        "README.md",
        "_SUCCESS",
        ".hidden.jsonl",
        "_tmp/x.jsonl",
        ".git/x.jsonl",
        "x.jsonl.tmp",
        "out.parquet.cbatch/part-0.parquet",
        "noext",
    )
    assert [Path(name).relative_to(tmp_path).as_posix() for name in names(tmp_path)] == [
        "B.JSONL",
        "c.json",
        "part-9.jsonl",
        "part-9.jsonl.gz",
        "part-10.jsonl",
        "sub/1.ndjson",
    ]


def test_a_hidden_folder_that_is_named_is_read(tmp_path: Path) -> None:
    touch(tmp_path, ".data/x.jsonl")
    assert names(tmp_path / ".data") == [str(tmp_path / ".data/x.jsonl")]


def test_globs_and_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a10.jsonl", "a9.jsonl", "d/e/f.jsonl", "we[ird].jsonl", "b.txt")
    monkeypatch.chdir(tmp_path)
    assert names("*.jsonl") == ["a9.jsonl", "a10.jsonl", "we[ird].jsonl"]
    assert names("**/*.jsonl")[-2:] == ["d/e/f.jsonl", "we[ird].jsonl"]
    assert names("we[ird].jsonl") == ["we[ird].jsonl"]
    # What a shell has expanded comes in the order of letters.
    assert names("a10.jsonl", "a9.jsonl", "d") == ["a9.jsonl", "a10.jsonl", "d/e/f.jsonl"]
    assert names("a9.jsonl", "a9.jsonl") == ["a9.jsonl", "a9.jsonl"]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no.jsonl does not exist"):
        names(tmp_path / "no.jsonl")
    with pytest.raises(UsageError, match="no file matches"):
        names(tmp_path / "*.jsonl")
    with pytest.raises(UsageError, match="holds no file of rows"):
        names(tmp_path)


def test_suffixes() -> None:
    def suffixes(name: str) -> tuple[str, str]:
        return InputFile(name, name).suffixes

    assert suffixes("a.jsonl") == (".jsonl", "")
    assert suffixes("A.CSV.GZ") == (".csv", ".gz")
    assert suffixes("dir.csv/a") == ("", "")
    assert suffixes("a.zst") == ("", ".zst")
    assert suffixes("https://h/a.jsonl.xz?token=a.csv#b") == (".jsonl", ".xz")
    assert suffixes("s3://bucket/a?b.csv") == (".csv", "")


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, *, is_terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(data))
    stdin.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_stdin_is_kept_for_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: type[bytes]
) -> None:
    spool_dir = tmp_path / "out.cbatch"
    set_stdin(monkeypatch, compress(ROW * 3))
    assert len(read_rows("-", spool_dir=spool_dir)) == 3
    assert os.listdir(spool_dir) == ["stdin.spool"]
    set_stdin(monkeypatch, b"")
    assert len(read_rows("-", spool_dir=spool_dir)) == 3
    set_stdin(monkeypatch, b"", is_terminal=True)
    assert len(read_rows("-", spool_dir=spool_dir)) == 3
    set_stdin(monkeypatch, compress(ROW * 3))
    assert len(read_rows("-", spool_dir=spool_dir)) == 3
    assert os.listdir(spool_dir) == ["stdin.spool"]
    set_stdin(monkeypatch, ROW * 5)
    rows = read_rows("-", spool_dir=spool_dir)
    assert [row.source_file for row in rows] == ["stdin"] * 5
    discard_spools(spool_dir)
    assert os.listdir(spool_dir) == []


def test_other_rows_on_stdin_do_not_replace_those_of_a_run_that_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (3, 4, 5):
        set_stdin(monkeypatch, ROW * count)
        assert len(read_rows("-", spool_dir=tmp_path)) == count
    set_stdin(monkeypatch, b"")
    assert len(read_rows("-", spool_dir=tmp_path)) == 3
    discard_spools(tmp_path, keep={tmp_path / "stdin.2.spool"})
    set_stdin(monkeypatch, b"")
    assert len(read_rows("-", spool_dir=tmp_path)) == 4
    set_stdin(monkeypatch, ROW * 9)
    assert len(read_rows("-", spool_dir=tmp_path)) == 9
    discard_later_spools(tmp_path)
    assert os.listdir(tmp_path) == ["stdin.2.spool"]


def test_stdin_may_hold_parquet_and_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["x", "y"]}), buffer)
    set_stdin(monkeypatch, buffer.getvalue())
    assert open_inputs("-", spool_dir=tmp_path).num_rows == 2
    set_stdin(monkeypatch, b"prompt,a\nx,1\n")
    assert len(read_rows("-", spool_dir=tmp_path, input_format="csv")) == 1


def test_stdin_without_a_place_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, ROW)
    assert len(read_rows("-")) == 1


def test_a_copy_that_was_not_finished_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdin.spool.tmp").write_bytes(ROW * 9)
    set_stdin(monkeypatch, b"", is_terminal=True)
    with pytest.raises(UsageError, match="terminal"):
        read_rows("-", spool_dir=tmp_path)
    set_stdin(monkeypatch, ROW)
    assert len(read_rows("-", spool_dir=tmp_path)) == 1
    assert os.listdir(tmp_path) == ["stdin.spool"]


def test_stdin_stands_alone(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    with pytest.raises(UsageError, match="cannot be combined"):
        names("-", tmp_path / "a.jsonl")


def test_a_named_pipe_is_copied(tmp_path: Path) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    touch(tmp_path, "z.jsonl")
    writer = threading.Thread(target=pipe.write_bytes, args=(ROW * 4,))
    writer.start()
    try:
        rows = read_rows([pipe, tmp_path / "z.jsonl"], spool_dir=tmp_path / "work")
    finally:
        writer.join()
    assert [row.source_file for row in rows] == [str(pipe)] * 4 + [str(tmp_path / "z.jsonl")]
    assert os.listdir(tmp_path / "work") == ["pipe-0.spool"]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/a\xff.jsonl"
    try:
        with open(path, "wb") as file:
            file.write(ROW)
    except OSError:
        pytest.skip("the file system takes only UTF-8")
    table = read_table([os.fsdecode(path)] * 2)
    assert table["source_file"].to_pylist()[0].endswith("/a?.jsonl")


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    yield file_system
    file_system.store.clear()


def test_remote_files(memory: fsspec.AbstractFileSystem) -> None:
    for name, data in {
        "/data/part-10.jsonl": ROW,
        "/data/part-9.jsonl.gz": gzip.compress(ROW * 2),
        "/data/_SUCCESS": b"",
        "/data/.x/1.jsonl": ROW,
        "/data/readme.txt": b"",
    }.items():
        memory.pipe(name, data)
    expected = ["memory:///data/part-9.jsonl.gz", "memory:///data/part-10.jsonl"]
    assert names("memory://data") == expected
    assert names("memory://data/*.jsonl*") == expected
    assert names("memory://data/part-10.jsonl") == ["memory://data/part-10.jsonl"]
    rows = read_rows("memory://data")
    assert [row.source_file for row in rows] == [expected[0], expected[0], expected[1]]
    assert open_inputs("memory://data").fraction_read == 0.0


def test_remote_parquet(memory: fsspec.AbstractFileSystem) -> None:
    with memory.open("/a.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["x", "y"]}), file)
    assert [row.columns["prompt"] for row in read_rows("memory://a.parquet")] == ["x", "y"]


def test_remote_files_that_cannot_be_opened(memory: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(UsageError, match="cannot open memory://none: no such file"):
        names("memory://none")
    with pytest.raises(UsageError, match="no file of rows at memory://none"):
        names("memory://none/*.jsonl")
    with pytest.raises(UsageError, match="cannot open nosuch://x"):
        names("nosuch://x")


def test_any_error_of_a_remote_file_system_names_the_file(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/a.jsonl", ROW * 3)

    class LostError(Exception):
        pass

    def lose(*_: object, **__: object) -> None:
        raise LostError("connection lost")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.read", lose)
    with pytest.raises(
        UsageError, match="cannot read memory://a.jsonl: LostError: connection lost"
    ):
        open_inputs("memory://a.jsonl")
