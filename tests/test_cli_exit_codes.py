"""The exit status of every way in which `cbatch run` can end, through real files."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cbatch_cli.assembly import EngineLoader
from cbatch_cli.cli import main
from cbatch_cli.data import durable_io
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.engine.step import SchedulerOutput
from cbatch_cli.errors import EngineError
from cbatch_cli.job import run_job
from tests.null_engine import NULL_LOADER, NullRunner

ROOT = Path(__file__).parent.parent

UseLoader = Callable[[EngineLoader], None]


@pytest.fixture
def use_loader(monkeypatch: pytest.MonkeyPatch) -> UseLoader:
    """Makes the command run with a loader of ours."""

    def use(loader: EngineLoader) -> None:
        monkeypatch.setitem(run_job.__kwdefaults__, "loader", loader)

    return use


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_loader: UseLoader) -> None:
    use_loader(NULL_LOADER)
    monkeypatch.chdir(tmp_path)
    write(["fine", "fine", "", "fine"])


def write(prompts: list[Any], name: str = "in.jsonl") -> None:
    rows = [{"prompt": prompt} for prompt in prompts]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*options: str) -> int:
    return main(["run", "in.jsonl", "-o", "out.parquet", "--max-tokens", "2", *options])


def num_answers() -> int:
    return sum(row is not None for row in pq.read_table("out.parquet")["completion"].to_pylist())


def test_0_done() -> None:
    write(["fine"])
    assert run() == 0
    assert run() == 0  # nothing to do
    assert num_answers() == 1


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_4_done_with_row_errors(output: str) -> None:
    arguments = ["run", "in.jsonl", "-o", output, "--max-tokens", "2"]
    assert main(arguments) == 4
    assert main(arguments) == 4  # nothing to do, and no better
    assert main([*arguments, "--allow-errors"]) == 0
    assert main([*arguments, "--retry-errors"]) == 4
    assert pq.read_table(output).num_rows == 4


def test_1_internal(use_loader: UseLoader, capsys: Any) -> None:
    def fail(*arguments: object) -> Any:
        raise ZeroDivisionError("by zero")

    use_loader(EngineLoader(identify=NULL_LOADER.identify, load=fail))
    assert run() == 1
    assert "internal error: ZeroDivisionError: by zero" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "absent.jsonl"],
        ["run", "in.jsonl", "--prompt-column", "absent"],
        ["run", "in.jsonl", "-o", "out.txt"],
        ["run", "in.jsonl", "-o", "in.jsonl"],
        ["run", "in.jsonl", "--max-tokens", "0"],
        ["run", "in.jsonl", "--shard", "2/2"],
        ["run", "in.jsonl", "--shard", "slurm"],
        ["run", "in.jsonl", "--errors-file", "in.jsonl"],
        ["run", "in.jsonl", "--chat"],  # the null model has no chat template
        ["status", "out.parquet"],
        ["merge", "out.parquet"],
    ],
)
def test_2_usage(arguments: list[str]) -> None:
    before = sorted(Path().iterdir())
    assert main(arguments) == 2
    assert sorted(Path().iterdir()) == before


def test_2_a_broken_template_is_told_before_a_model_is_loaded(
    use_loader: UseLoader, capsys: Any
) -> None:
    def fail(*arguments: object) -> Any:
        raise AssertionError("a model was loaded")

    use_loader(EngineLoader(identify=NULL_LOADER.identify, load=fail))
    assert main(["run", "in.jsonl", "--template", "{{ prompt"]) == 2
    assert "--template does not compile" in capsys.readouterr().err


def test_2_an_output_in_the_way() -> None:
    Path("out.parquet").write_text("mine")
    assert run() == 2
    assert Path("out.parquet").read_text() == "mine"


@pytest.mark.parametrize("options", [["--top-k", "3"], ["--columns", "none"], ["-m", "other"]])
def test_3_a_different_job(options: list[str]) -> None:
    assert run() == 4
    assert run(*options) == 3
    assert run(*options, "--overwrite") == 4


def test_3_a_changed_input() -> None:
    assert run() == 4
    write(["other"])
    assert run() == 3


def test_5_a_folder_that_cannot_be_made() -> None:
    Path("file").touch()
    assert main(["run", "in.jsonl", "-o", "file/out.parquet"]) == 5


@pytest.mark.parametrize(
    "step", ["mkdir", "lock", "open", "write", "fsync", "rename", "fsync dir", "unlink"]
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_5_the_output_cannot_be_written(
    step: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, path: Path) -> None:
        if name == f"before {step}":
            raise OSError(number, "as injected")

    with monkeypatch.context() as patch:
        patch.setattr(durable_io, "on_step", fail)
        assert run() == 5
    assert run() == 4
    assert num_answers() == 3


def test_6_the_engine_fails(use_loader: UseLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: NullRunner, step: SchedulerOutput, stats: Any) -> Any:
        raise EngineError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(NullRunner, "execute", fail)
        assert run() == 6
    assert run() == 4


def test_7_another_run_is_writing_the_output() -> None:
    with WorkDir(Path("out.parquet.cbatch")):
        assert run() == 7
    assert run() == 4


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--on-error", "fail"], 8),
        (["--max-errors", "0"], 8),
        (["--max-errors", "1"], 4),
        (["--max-errors", "24%"], 8),
        (["--max-errors", "30%"], 4),
        (["--max-errors", "0", "--allow-errors"], 8),
    ],
)
def test_8_row_errors_end_the_run(options: list[str], status: int) -> None:
    write(["fine", "fine", "", "fine"] * 30 if "%" in options[1] else ["fine", "", "fine"])
    assert run(*options) == status
    # What is done is kept, and the run goes on without the limit.
    assert run() == 4


def test_8_the_first_rows_all_fail() -> None:
    write([""] * 100 + ["fine"])
    assert run() == 8
    assert not Path("out.parquet").exists()
    assert run("--max-errors", "100") == 4
    write([""] * 99, "few.jsonl")
    assert main(["run", "few.jsonl", "-o", "few.parquet"]) == 4


SLOW_RUN = """
import sys, time
from cbatch_cli.cli import main
from cbatch_cli.job import run_job
from tests.null_engine import NULL_LOADER, NullRunner

execute = NullRunner.execute

def slowly(self, step, stats):
    time.sleep(0.02)
    return execute(self, step, stats)

if sys.argv[1] == "slow":
    NullRunner.execute = slowly
run_job.__kwdefaults__["loader"] = NULL_LOADER
options = ["--max-tokens", "20", "--max-num-seqs", "2"]
sys.exit(main(["run", "in.jsonl", "-o", "out.parquet", *options]))
"""


def start(how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_RUN, how]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_rows() -> None:
    """Return once the run has rows in its journal."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        sizes = [path.stat().st_size for path in Path("out.parquet.cbatch").glob("journal-*.bin")]
        if sizes and max(sizes) > 1000:
            return
        time.sleep(0.02)
    pytest.fail("no row was journaled")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_130_and_143_interrupted(number: signal.Signals, status: int) -> None:
    write(["fine"] * 300)
    with start("slow") as process:
        wait_for_rows()
        process.send_signal(number)
        assert process.wait(120) == status
        assert process.stderr is not None
        told = process.stderr.read()
    if status > 0:
        assert "rows are safe; resume with: cbatch" in told
    assert not Path("out.parquet").exists()
    with start("fast") as process:
        assert process.wait(120) == 0
    rows = pq.read_table("out.parquet")
    assert rows["row_index"].to_pylist() == list(range(300))
    metadata = json.loads(pq.read_metadata("out.parquet").metadata[b"cbatch.run"])
    assert 0 < metadata["totals"]["rows_resumed"] < 300
