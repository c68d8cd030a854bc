"""The work directory beside an output: who may write there, and what a dead run left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from cbatch_cli.data import durable_io
from cbatch_cli.data.journal_records import SEGMENT_NAME
from cbatch_cli.data.json_text import dump_json
from cbatch_cli.data.output_target import PART_NAME
from cbatch_cli.errors import OutputError, OutputLockedError, ResumeMismatchError

LOCK_NAME = "lock"
RUN_NAME = "run.json"
FORMAT = 1
"""Of everything in the directory: raised when a run could no longer take up what is there."""


class WorkDir:
    """The locked work directory of one running job; use with `with`, or `close` it.

    The lock ends with the process, however that ends. Raises `OutputLockedError` when another
    process holds it, else `OutputError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        if self._lock is None:
            raise OutputLockedError(
                f"{path} is locked by another run{_process(owner(path))}; "
                "wait for it to end, or choose another output"
            )

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Store what this job is, as `run.json`, in a way that survives power loss."""
        durable_io.write_durably(self.path / RUN_NAME, dump_json({"format": FORMAT, **run}))

    def read_run(self) -> dict[str, Any] | None:
        """What `write_run` stored; see the function of this name."""
        return read_run(self.path)

    @property
    def has_run(self) -> bool:
        """Whether there is a run that `write_run` has stored."""
        return (self.path / RUN_NAME).exists()

    def start_over(self) -> None:
        """Forget the run: `run.json` goes first, since it vouches for all the other files."""
        durable_io.unlink(self.path / RUN_NAME)
        durable_io.fsync_dir(self.path)
        self.discard_work()
        durable_io.fsync_dir(self.path)

    def discard_work(self) -> None:
        """Remove parts, journal and unfinished files, which a run that is done needs no more."""
        for name in durable_io.list_dir(self.path):
            is_part = PART_NAME.fullmatch(name) is not None
            if is_part or name.endswith(".tmp") or SEGMENT_NAME.fullmatch(name):
                durable_io.unlink(self.path / name)

    def discard_unfinished(self) -> None:
        """Remove the files that a run had not finished when it died."""
        for name in durable_io.list_dir(self.path):
            if name.endswith(".tmp"):
                durable_io.unlink(self.path / name)

    def close(self) -> None:
        """Free the lock; the directory goes too if nothing was stored in it."""
        fd, self._lock = self._lock, None
        if fd is None:
            return
        try:
            # Removed while it is still held: whoever waits for this name finds a new file.
            durable_io.unlink(self.path / LOCK_NAME)
            durable_io.remove_empty_dir(self.path)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_run(path: Path) -> dict[str, Any] | None:
    """The run that the work directory `path` tells of, locked or not; None where there is none.

    Raises `OutputError` for what cannot be read: to take it for nothing would give up all that
    is done. Raises `ResumeMismatchError` for what another version has left.
    """
    run_file = path / RUN_NAME
    try:
        run = _load_json(run_file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(f"cannot read {run_file}: {error.strerror or error}") from error
    except ValueError:
        raise OutputError(f"{run_file} is damaged; start over with --overwrite") from None
    if run.get("format") != FORMAT:
        raise ResumeMismatchError(
            f"{path} was left by another version of cbatch; use that one to resume, "
            "start over with --overwrite, or choose another output with -o"
        )
    return run


def is_in_use(path: Path) -> bool:
    """Whether a run has the work directory `path`; asking does not disturb it."""
    return durable_io.is_locked(path / LOCK_NAME)


def owner(path: Path) -> int | None:
    """The process of the run that has the work directory `path`; None where it has not said."""
    try:
        return int((path / LOCK_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _lock(path: Path) -> int | None:
    """Lock the directory, made if it is not there; None if another process has the lock."""
    while True:
        durable_io.make_dir(path)
        try:
            return durable_io.lock(path / LOCK_NAME)
        except OutputError as error:
            # Its owner removed it between the two steps.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise


def _load_json(data: bytes) -> dict[str, Any]:
    """Raises `ValueError` for what is no object."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        # It takes no lone surrogates, which stand for bytes of a file name that is not UTF-8.
        value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _process(pid: int | None) -> str:
    return "" if pid is None else f" (process {pid})"
