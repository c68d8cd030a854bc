"""What a crash or a failing disk leaves of the sink's files, at every step it could strike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cbatch_cli.data import durable_io
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.errors import OutputError
from tests.data.output_fakes import expected_rows, fill, make_sink, read_rows, write_rows


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> OutputTarget:
    name = "out" if request.param else "out.parquet"
    return OutputTarget(path=tmp_path / name, is_directory=request.param)


class Killed(BaseException):
    """The process is gone: nothing after it may touch a file."""


def assert_whole(target: OutputTarget) -> None:
    """What a reader can see now is complete."""
    if not target.is_directory:
        if target.path.exists():
            assert read_rows(target.path) == expected_rows(6)
        return
    for path in target.path.glob("*"):
        assert path.name.startswith("part-") and path.suffix == ".parquet"
        start = 2 * int(path.stem.removeprefix("part-"))
        assert read_rows(path) == expected_rows(6)[start : start + 2]


def count_steps(target: OutputTarget, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run once, looking at the target as a reader would at every step."""
    num_steps = 0

    def look(step: str, path: Path) -> None:
        nonlocal num_steps
        num_steps += 1
        if "write" not in step:
            assert_whole(target)

    with monkeypatch.context() as patch:
        patch.setattr(durable_io, "on_step", look)
        write_rows(target, (5, 0, 1, 2, 4, 3), rows_per_part=2)
    return num_steps


def stop_at(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> Sequence[str]:
    """Run into `error` at step `at` and return the names of the steps taken before it."""
    steps: list[str] = []

    def stop(step: str, path: Path) -> None:
        is_killed = isinstance(error, Killed)
        if len(steps) == at or (is_killed and len(steps) > at):
            steps.append("stopped")
            raise error
        steps.append(step)

    with monkeypatch.context() as patch:
        patch.setattr(durable_io, "on_step", stop)
        sink = make_sink(target, rows_per_part=2)
        try:
            fill(sink, (5, 0, 1, 2, 4, 3))
            sink.finish({})
        except (Killed, OutputError) as caught:
            assert caught is error or caught.__cause__ is error
            if not isinstance(error, Killed):
                sink.abort()
        else:
            raise AssertionError("the run did not notice")
    return steps


def test_a_kill_at_any_step_leaves_only_whole_files(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = count_steps(target, monkeypatch)
    assert read_rows(target.path) == expected_rows(6)
    for at in range(num_steps):
        killed = OutputTarget(
            path=target.path.with_name(f"{at}-{target.path.name}"),
            is_directory=target.is_directory,
        )
        stop_at(killed, monkeypatch, at, Killed())
        assert_whole(killed)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_failure_at_any_step_is_told_and_leaves_only_whole_files(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    num_steps = count_steps(target, monkeypatch)
    for at in range(0 if is_before else 1, num_steps, 2):
        failed = OutputTarget(
            path=target.path.with_name(f"{at}-{target.path.name}"),
            is_directory=target.is_directory,
        )
        stop_at(failed, monkeypatch, at, OSError(28, "No space left on device"))
        assert_whole(failed)
        leftovers = [name for name in os.listdir(failed.work_dir) if name.endswith(".tmp")]
        assert leftovers == [] or not is_before


def test_a_name_is_given_only_to_bytes_that_are_on_the_device(
    target: OutputTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, bool] = {}
    renamed: list[str] = []

    def check(step: str, path: Path) -> None:
        if step in ("after open", "before write"):
            synced[path.name] = False
        elif step == "after fsync":
            synced[path.name] = True
        elif step == "before rename":
            assert synced[path.name + ".tmp"]
            renamed.append(path.name)
        elif step == "after fsync dir":
            assert path == (target.path if target.is_directory else last_folder())

    def last_folder() -> Path:
        is_last = renamed[-1] == target.path.name
        return target.path.parent if is_last else target.work_dir

    monkeypatch.setattr(durable_io, "on_step", check)
    write_rows(target, (5, 0, 1, 2, 4, 3), rows_per_part=2)

    parts = [f"part-{number:05d}.parquet" for number in (0, 2, 1)]
    assert renamed == [*parts, parts[1] if target.is_directory else "out.parquet"]
