"""Runs of a job in processes of their own, forked from one that has imported everything already.

The server is a process with a single thread, so a fork of it is a fresh start that costs
milliseconds. It reads one `Run` as JSON a line, and answers each with an `Outcome`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Settings under which imports start no threads."""


@dataclass(kw_only=True)
class Run:
    """One run of a job, and what shall happen to it."""

    folder: str
    """Where its logs go: `rows.log`, `trace.log` and `errors.txt` are appended to."""
    options: dict[str, Any]
    """Of `build_job_config`."""
    salt: int = 0
    """Makes the answers of this run differ from those of any other."""
    kill_at_step: int | None = None
    """Die of SIGKILL at this call of `durable_io.on_step`, counted from 0."""
    kill_after_s: float | None = None
    signal_after_s: float | None = None
    """Be sent SIGTERM after so long."""
    fault: dict[str, Any] | None = None
    """See `child.Fault`."""
    step_s: float = 0.0
    """How long a step of the engine takes."""
    fail_rows: list[int] = field(default_factory=list)
    """Rows for which the engine fails."""
    trace: bool = False
    """Whether to log every step, for images of a power failure."""
    barrier: str | None = None
    """A file to wait for before the start, so that runs start together."""
    hold: str | None = None
    """A file that the engine waits for in its first step."""
    max_bytes: int | None = None
    """Address space the process may use."""


@dataclass(kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    is_hung: bool
    peak_bytes: int
    """Most memory that the process had in use."""

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL came before the end of the run."""
        return self.exit_code == -signal.SIGKILL


class ForkServer:
    """The server, seen from a test; use with `with`."""

    def __init__(self, module: str = "tests.crash.fork_server") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, run: Run) -> Outcome:
        """Run it to whatever end."""
        self.start(run)
        return self.wait()

    def start(self, run: Run) -> None:
        """Begin a run; `wait` gives its outcome."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(run)) + "\n")
        self._process.stdin.flush()

    def is_done(self) -> bool:
        """Whether the run that was started has ended."""
        return bool(select.select([self._process.stdout], [], [], 0.01)[0])

    def wait(self) -> Outcome:
        """The outcome of the run that was started."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server died"
        return Outcome(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


def serve() -> None:
    """Answer runs until stdin ends."""
    from tests.crash import child

    child.import_everything()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the fork"
    for line in sys.stdin:
        outcome = _fork(Run(**json.loads(line)))
        print(json.dumps(asdict(outcome)), flush=True)


def _fork(run: Run) -> Outcome:
    from tests.crash import child

    started_at = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child.main(run)
    pidfd = os.pidfd_open(pid)
    is_hung = False
    try:
        if run.signal_after_s is not None:
            _wait(pidfd, run.signal_after_s)
            _signal(pid, signal.SIGTERM)
        if run.kill_after_s is not None:
            _wait(pidfd, run.kill_after_s)
            _signal(pid, signal.SIGKILL)
        if not _wait(pidfd, TIMEOUT_S):
            is_hung = True
            _signal(pid, signal.SIGABRT)  # faulthandler tells where it stands
    finally:
        os.close(pidfd)
    _, status, usage = os.wait4(pid, 0)
    return Outcome(
        exit_code=os.waitstatus_to_exitcode(status),
        seconds=time.monotonic() - started_at,
        is_hung=is_hung,
        peak_bytes=1024 * usage.ru_maxrss,
    )


def _wait(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def _signal(pid: int, number: int) -> None:
    # Not waited for yet, so that the id is still its own.
    os.kill(pid, number)


if __name__ == "__main__":
    serve()
