"""The work directory beside an output: who may write there, and what a dead run left behind."""

from __future__ import annotations

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
from cbatch_cli.errors import OutputLockedError

LOCK_NAME = "lock"
RUN_NAME = "run.json"


class WorkDir:
    """The locked work directory of one running job; use with `with`, or `close` it.

    The lock ends with the process, however that ends. Raises `OutputLockedError` when another
    process holds it, else `OutputError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        durable_io.make_dir(path)
        self._lock = durable_io.lock(path / LOCK_NAME)
        if self._lock is None:
            raise OutputLockedError(
                f"{path} is locked by another run{_owner(path / LOCK_NAME)}; "
                "wait for it to end, or choose another output"
            )

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Store what this job is, as `run.json`, in a way that survives power loss."""
        durable_io.write_durably(self.path / RUN_NAME, dump_json(run))

    def read_run(self) -> dict[str, Any] | None:
        """What `write_run` stored; None where there is nothing that can be read."""
        try:
            run = orjson.loads((self.path / RUN_NAME).read_bytes())
        except (OSError, ValueError):
            return None
        return run if isinstance(run, dict) else None

    def start_over(self) -> None:
        """Remove the parts, the journal and the unfinished files of a run that died."""
        for name in durable_io.list_dir(self.path):
            is_part = PART_NAME.fullmatch(name) is not None
            if is_part or name.endswith(".tmp") or SEGMENT_NAME.fullmatch(name):
                durable_io.unlink(self.path / name)
        durable_io.fsync_dir(self.path)

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


def _owner(lock: Path) -> str:
    try:
        pid = lock.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (process {pid})" if pid else ""
