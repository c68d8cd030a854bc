"""Templates as the rest of the program sees them: rows in, text or a row error out.

The rendering itself happens in a worker process with limits on CPU time, memory and output, which
is started again when a template has used it up. That also keeps it off the engine's interpreter.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cbatch_cli.errors import EngineError, RowError, RowErrorType, UsageError
from cbatch_cli.text.render_worker import (
    BLOB_HEADER,
    FRAME_HEADER,
    REPLY_HEADER,
    RenderLimits,
    Reply,
    WorkerSetup,
)

_WORKER = "from cbatch_cli.text.render_worker import main; main()"
_FRAME_BYTES = 2**20
"""A frame is sent before its answers are read, so the worker takes it in whole."""


def read_template(template: str) -> str:
    """The text of a template given as text or as `@FILE`.

    Raises `UsageError` if the file cannot be read as UTF-8.
    """
    if not template.startswith("@"):
        return template
    path = Path(template[1:]).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the template {path}: {error}") from None


def load_template(template: str) -> str:
    """`read_template` of one that compiles, so that a wrong one is told before a model is loaded.

    Raises as `read_template` and `TemplateRenderer` do.
    """
    text = read_template(template)
    TemplateRenderer(row_template=text).close()
    return text


class TemplateRenderer:
    """Renders rows through the user's template and messages through the model's chat template.

    Waits until the worker has compiled them. Raises `UsageError` if one does not compile, and
    `EngineError` if no worker can be started. Used by one thread at a time; a context manager.
    """

    def __init__(
        self,
        *,
        row_template: str | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, Any] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self._setup = WorkerSetup(
            limits=limits or RenderLimits(),
            row_template=row_template,
            chat_template=chat_template,
            special_tokens=special_tokens or {},
        )
        self._worker = _Worker(self._setup)

    def render_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str | RowError]:
        """The user's template over the columns of each row."""
        return self._render("row", rows)

    def render_chats(self, chats: Sequence[Sequence[Any]]) -> list[str | RowError]:
        """The chat template over each list of messages, ready for the model's turn."""
        return self._render("chat", chats)

    def close(self) -> None:
        """End the worker; the renderer cannot be used after that."""
        self._worker.close()

    def __enter__(self) -> TemplateRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self, kind: str, items: Sequence[Any]) -> list[str | RowError]:
        results: list[str | RowError] = []
        while len(results) < len(items):
            frame = _frame(kind, items, len(results))
            answers = self._worker.render(frame)
            results += answers
            if len(answers) < len(frame):  # the worker died of the row that it owes
                results.append(_template_error(self._worker.cause_of_death()))
                self._worker.close()
                self._worker = _Worker(self._setup)
        return results


class _Worker:
    """One worker process and its two pipes."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._limits = setup.limits
        self._process = subprocess.Popen(
            [_python(), "-P", "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": _search_path()},
            start_new_session=True,  # Ctrl-C is for the parent to handle
        )
        self._stdin, self._stdout = _pipes(self._process)
        # Also when the owner is dropped without being closed.
        self._finalizer = weakref.finalize(self, _stop, self._process)
        self._write(_as_blob(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)))
        answer = self._read_answer()
        if answer is None:
            cause = self.cause_of_death()
            self.close()
            if self._process.returncode == -signal.SIGPROF:
                raise UsageError(f"{cause} to compile")
            raise EngineError(f"templates cannot be rendered: {cause}")
        if isinstance(answer, RowError):
            self.close()
            raise UsageError(answer.message)

    def render(self, frame: Sequence[bytes]) -> list[str | RowError]:
        """An answer per row, or fewer if the worker died of the row that follows them."""
        self._write(FRAME_HEADER.pack(len(frame)) + b"".join(map(_as_blob, frame)))
        answers: list[str | RowError] = []
        while len(answers) < len(frame):
            answer = self._read_answer()
            if answer is None:
                break
            answers.append(answer)
        return answers

    def cause_of_death(self) -> str:
        """Why the process ended, once its pipe has closed."""
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"the template takes more than {self._limits.cpu_seconds:g} s of CPU time"
        return f"the template's process ended with status {status}"

    def close(self) -> None:
        self._finalizer()

    def _write(self, payload: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: reading will say so
            self._stdin.write(payload)
            self._stdin.flush()

    def _read_answer(self) -> str | RowError | None:
        header = self._stdout.read(REPLY_HEADER.size)
        if len(header) < REPLY_HEADER.size:
            return None
        reply, length = REPLY_HEADER.unpack(header)
        payload = self._stdout.read(length)
        if len(payload) < length:
            return None
        text = payload.decode()
        return text if reply == Reply.TEXT else _template_error(text)


def _template_error(message: str) -> RowError:
    return RowError(RowErrorType.TEMPLATE_ERROR, message)


def _frame(kind: str, items: Sequence[Any], start: int) -> list[bytes]:
    """The items from `start` on that one frame takes, pickled: at least one, about a MiB."""
    frame: list[bytes] = []
    size = 0
    while start + len(frame) < len(items) and size < _FRAME_BYTES:
        frame.append(pickle.dumps((kind, items[start + len(frame)]), pickle.HIGHEST_PROTOCOL))
        size += len(frame[-1])
    return frame


def _as_blob(payload: bytes) -> bytes:
    return BLOB_HEADER.pack(len(payload)) + payload


def _python() -> str:
    if not sys.executable:
        raise EngineError("templates need a Python interpreter to run in; none is known here")
    return sys.executable


def _search_path() -> str:
    """What this process imports from, so that the worker finds the same package."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(BrokenPipeError):  # closing flushes what it never took
            pipe.close()
