"""What happens in the forked process: one run, watched, slowed, broken or killed.

Two logs are kept outside of the store, each line by one write, so that they survive SIGKILL.
`rows.log` has a JSON list a line: `["given", row, resumed ids, attempt]` when the engine is given
a row, `["done", row, completion, finished_at]` when the writer hands a result to the journal,
`["kept", row]` when the journal has taken it, `["durable", rows]` when it is on the device or in a
part that is. `trace.log` has the steps of `durable_io`, see `power.Disk`.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cbatch_cli.assembly import EngineLoader, LoadedEngine, Log, print_nothing
from cbatch_cli.config import EngineConfig, build_job_config
from cbatch_cli.data import durable_io
from cbatch_cli.data.journal import Journal
from cbatch_cli.data.row import RowResult
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import CBatchError
from cbatch_cli.job import run_job
from cbatch_cli.request import Request, RequestOutput
from tests import null_engine
from tests.crash.fork_server import Run

SHADOW = "shadow"
"""Folder with a hard link to every file that was ever opened, named by inode."""


def import_everything() -> None:
    """Load what a run loads, without starting a thread."""
    import pyarrow as pa

    pa.array([""])  # loads pandas where it is installed


def main(run: Run) -> NoReturn:
    """The run; the process ends with its exit code."""
    folder = Path(run.folder)
    errors = os.open(folder / "errors.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    faulthandler.enable()  # SIGABRT tells where a run that hangs stands
    if run.max_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (run.max_bytes, run.max_bytes))
    code = 1
    try:
        steps = Steps(run)
        durable_io.on_step = steps.on_step
        _watch_journal(steps.log_row)
        config = build_job_config(run.options)
        wait_for(run.barrier)
        run_job(config, loader=EngineLoader(identify=str, load=_loader(run, steps.log_row)))
        code = 0
    except CBatchError as error:
        os.write(2, f"{error.exit_code}: {error}\n".encode(errors="replace"))
        code = error.exit_code
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def wait_for(path: str | None) -> None:
    """Return once the file is there."""
    while path is not None and not os.path.exists(path):
        time.sleep(0.001)


class Fault:
    """An operation that fails: the `number`th of its kind, or that one and all after it.

    `kind` is a step of `durable_io`, `code` the name of the error, `is_lasting` whether all that
    come after fail too. `is_half` lets a write write half of its bytes first.
    """

    def __init__(
        self, *, kind: str, number: int, code: str, is_lasting: bool, is_half: bool = False
    ) -> None:
        self._step = f"before {kind}"
        self._number = number
        self._code = getattr(errno, code)
        self._is_lasting = is_lasting
        self._is_half = is_half
        self._count = -1
        self._lock = threading.Lock()
        self.is_met = False

    def check(self, step: str) -> None:
        """Raise, if it is this step's turn."""
        if step != self._step:
            return
        with self._lock:
            self._count += 1
            is_met = self._count == self._number
            is_met = is_met or (self._is_lasting and self._count > self._number)
            if not is_met:
                return
            self.is_met = True
        if self._is_half:
            half_writes.pending = True
            return
        raise OSError(self._code, os.strerror(self._code))


class _HalfWrites(threading.local):
    pending = False


half_writes = _HalfWrites()
_real_write = os.write


def _write_half(fd: int, data: Any) -> int:
    if half_writes.pending:
        half_writes.pending = False
        _real_write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _real_write(fd, data)


class Steps:
    """Counts the steps, and does to them what the run asks for."""

    def __init__(self, run: Run) -> None:
        self._folder = Path(run.folder)
        self._kill_at = run.kill_at_step
        self._fault = None if run.fault is None else Fault(**run.fault)
        if run.fault is not None and run.fault.get("is_half"):
            os.write = _write_half
        self._count = 0
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._rows = os.open(self._folder / "rows.log", flags)
        self._trace = os.open(self._folder / "trace.log", flags) if run.trace else None
        if run.trace:
            (self._folder / SHADOW).mkdir(exist_ok=True)

    def log_row(self, *values: Any) -> None:
        """Append a line to the log of rows."""
        _real_write(self._rows, json.dumps(values).encode() + b"\n")

    def on_step(self, step: str, path: Path) -> None:
        """In place of `durable_io.on_step`."""
        with self._lock:
            count, self._count = self._count, self._count + 1
            if self._trace is not None:
                self._log_step(step, path)
            if count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        if self._fault is not None:
            try:
                self._fault.check(step)
            finally:
                if self._fault.is_met:
                    (self._folder / "fault_met").touch()

    def _log_step(self, step: str, path: Path) -> None:
        """With the inode that the path has now, its size, and that of the file to be renamed."""
        inode, size = _inode(path)
        if inode and not path.is_dir():
            _link(path, self._folder / SHADOW / str(inode))
        source = None
        if step == "before rename":
            places = [path.parent, path.with_name(path.name + ".cbatch")]
            places.append(path.parent.with_name(path.parent.name + ".cbatch"))
            source = next(
                name for place in places if (name := place / (path.name + ".tmp")).exists()
            )
            inode, size = _inode(source)
            _link(source, self._folder / SHADOW / str(inode))
        values = [step, str(path), inode, size, str(source or ""), threading.get_ident()]
        assert self._trace is not None
        _real_write(self._trace, json.dumps(values).encode() + b"\n")


def _inode(path: Path) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size


def _link(path: Path, shadow: Path) -> None:
    # As long as the link is there the inode is not given to another file.
    if not shadow.exists():
        os.link(path, shadow)


def _watch_journal(log: Any) -> None:
    append_result, drop, opener = Journal.append_result, Journal.drop, Journal.open.__func__  # type: ignore[attr-defined]

    def append(self: Journal, row_index: int, content_hash: bytes, result: RowResult) -> None:
        finished_at = result.metrics.finished_at
        log("done", row_index, result.completion, finished_at and finished_at.isoformat())
        append_result(self, row_index, content_hash, result)
        log("kept", row_index)

    def drop_rows(self: Journal, rows: range) -> None:
        log("durable", list(rows))
        drop(self, rows)

    def open_journal(cls: type[Journal], directory: Path) -> Journal:
        def on_durable(rows: Sequence[int]) -> None:
            log("durable", list(rows))

        journal: Journal = opener(cls, directory, on_durable=on_durable)
        return journal

    Journal.append_result = append  # type: ignore[method-assign]
    Journal.drop = drop_rows  # type: ignore[method-assign]
    Journal.open = classmethod(open_journal)  # type: ignore[assignment]


def _loader(run: Run, log: Any) -> Any:
    """The null engine, whose answers depend on the run too."""

    def execute(
        self: null_engine.NullRunner, step: SchedulerOutput, stats: EngineStats
    ) -> StepOutput:
        wait_for(run.hold)
        if run.step_s:
            time.sleep(run.step_s)
        token_ids = {
            scheduled.key: (salted_token(run.salt, scheduled.key.row, position),)
            for scheduled in step.scheduled
            if scheduled.samples
            for position in [scheduled.start + scheduled.num_tokens]
        }
        return StepOutput(step_id=step.step_id, token_ids=token_ids)

    def load(model: str, config: EngineConfig, to_log: Log = print_nothing) -> LoadedEngine:
        engine = null_engine.load_null_engine(model, config, to_log)
        generate = engine.client.generate

        def watched(requests: Iterable[Request]) -> Iterator[RequestOutput]:
            def seen() -> Iterator[Request]:
                for request in requests:
                    resumed = bytes(request.resumed_token_ids).decode()
                    log("given", request.key.row, resumed, request.attempt)
                    yield request

            yield from generate(seen())

        engine.client.generate = watched  # type: ignore[method-assign]
        return engine

    null_engine.NullRunner.execute = execute  # type: ignore[method-assign]
    return load


def salted_token(salt: int, row: int, position: int) -> int:
    """The id that a row has at a position in the run of that salt."""
    return null_engine.null_token(row + 1_000_003 * salt, position)
