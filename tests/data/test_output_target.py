"""What `-o` means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbatch_cli.data import output_target
from cbatch_cli.data.output_target import OutputTarget, part_name, resolve_target
from cbatch_cli.errors import UsageError


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("first_input", "expected"),
    [
        ("data/prompts.jsonl", "prompts.results.parquet"),
        ("prompts.jsonl.gz", "prompts.results.parquet"),
        ("v1.5.csv.zst", "v1.5.results.parquet"),
        ("in.parquet", "in.results.parquet"),
        ("notes.final", "notes.final.results.parquet"),
        ("data/", "data.results.parquet"),
        ("data/*.jsonl", "data.results.parquet"),
        ("data/[ab]/**/x.jsonl", "data.results.parquet"),
        ("s3://bucket/big.jsonl.gz", "big.results.parquet"),
    ],
)
def test_the_default_is_named_after_the_first_input(first_input: str, expected: str) -> None:
    target = resolve_target(None, [first_input, "other.jsonl"])

    assert target == OutputTarget(path=Path(expected), is_directory=False)
    assert target.work_dir == Path(expected + ".cbatch")


@pytest.mark.parametrize("first_input", ["-", ".jsonl"])
def test_an_input_without_a_name_needs_an_output(first_input: str) -> None:
    with pytest.raises(UsageError, match="-o"):
        resolve_target(None, [first_input])
    assert resolve_target("x.parquet", [first_input]).path == Path("x.parquet")


def test_a_file_and_its_work_dir() -> None:
    target = resolve_target("deep/out.parquet", ["in.jsonl"])

    assert not target.is_directory
    assert target.path == Path("deep/out.parquet")
    assert target.work_dir == Path("deep/out.parquet.cbatch")
    assert target.part_path(7) == Path("deep/out.parquet.cbatch/part-00007.parquet")


def test_a_folder_by_its_slash_or_because_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "there.parquet").mkdir()

    for text in ("new/", "there.parquet"):
        target = resolve_target(text, ["in.jsonl"])
        assert target.is_directory
        assert target.work_dir == Path(text.rstrip("/") + ".cbatch")
        assert target.part_path(7) == Path(text, "part-00007.parquet")


def test_the_current_folder_has_its_work_dir_outside_itself(tmp_path: Path) -> None:
    target = resolve_target(".", ["/elsewhere/in.jsonl"])

    assert target.path == tmp_path
    assert target.work_dir == tmp_path.parent / f"{tmp_path.name}.cbatch"


@pytest.mark.parametrize("text", ["answers", "out.jsonl", "/", "file.parquet/"])
def test_other_names_are_refused(text: str) -> None:
    Path("file.parquet").touch()
    with pytest.raises(UsageError, match="-o"):
        resolve_target(text, ["in.jsonl"])


def test_an_input_is_never_the_output(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.parquet").touch()
    os.symlink("data/in.parquet", "link.parquet")

    for output, source in (
        ("data/in.parquet", "data/in.parquet"),
        ("link.parquet", "data/in.parquet"),
        ("data/", "data/in.parquet"),
        ("data/", "data"),
        ("data/out.parquet", "data"),
    ):
        with pytest.raises(UsageError, match="choose another -o"):
            resolve_target(output, [source])
    with pytest.raises(UsageError, match="choose another -o"):
        resolve_target(None, ["."])


def test_an_existing_file_needs_overwrite_and_stays_until_it_is_replaced() -> None:
    target = resolve_target("out.parquet", ["in.jsonl"])
    target.prepare(overwrite=False)
    target.path.write_bytes(b"precious")

    with pytest.raises(UsageError, match=r"out.parquet exists already.*-o.*--overwrite"):
        target.prepare(overwrite=False)
    target.prepare(overwrite=True)
    target.clear()

    assert target.path.read_bytes() == b"precious"


def test_a_folder_is_made_or_emptied_of_parts_only_when_told() -> None:
    target = resolve_target("out/", ["in.jsonl"])
    target.work_dir.mkdir()
    target.prepare(overwrite=False)
    target.prepare(overwrite=False)
    names = ["part-00000.parquet", "part-a100000.parquet"]
    for name in names:
        (target.path / name).touch()

    with pytest.raises(UsageError, match=r"out exists already.*--overwrite"):
        target.prepare(overwrite=False)
    assert sorted(os.listdir(target.path)) == names
    target.prepare(overwrite=True)
    assert sorted(os.listdir(target.path)) == names
    target.clear()
    assert os.listdir(target.path) == []


def test_a_folder_with_other_files_is_refused_and_left_alone() -> None:
    target = resolve_target("out/", ["in.jsonl"])
    target.work_dir.mkdir()
    target.prepare(overwrite=False)
    names = ["README.md", "part-00000.parquet"]
    for name in names:
        (target.path / name).touch()

    with pytest.raises(UsageError, match="'README.md'"):
        target.prepare(overwrite=True)

    assert sorted(os.listdir(target.path)) == names


def test_a_folder_on_another_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve_target("out/", ["in.jsonl"])
    target.work_dir.mkdir()
    stat = Path.stat

    def mounted(path: Path, **options: bool) -> os.stat_result:
        values = list(stat(path, **options))
        values[2] += path.name == "out"
        return os.stat_result(values)

    monkeypatch.setattr(output_target.Path, "stat", mounted)

    with pytest.raises(UsageError, match="another file system"):
        target.prepare(overwrite=False)


def test_the_order_of_part_names_is_the_order_of_parts() -> None:
    numbers = [0, 9, 10, 99_999, 100_000, 100_001, 999_999, 1_000_000]

    names = [part_name(number) for number in numbers]

    assert names[0] == "part-00000.parquet"
    assert sorted(names) == names
    assert all(output_target.PART_NAME.fullmatch(name) for name in names)


def test_a_pattern_in_the_current_folder_is_named_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = resolve_target(None, ["*.jsonl"])
    assert target.path == Path(f"{tmp_path.name}.results.parquet")
