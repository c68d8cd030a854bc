"""The process in which templates run, apart from everything that must survive them.

A sandbox keeps a template from reaching files and modules. It does not bound what a template
costs: `'x' * 10**9`, `10**10**9` or two nested loops are plain expressions, and a thread inside
one long C call cannot be stopped. A process can: the kernel ends it when its CPU timer runs out,
and refuses it memory beyond a limit.

The parent sends one setup blob, then frames of row blobs, all pickled; the worker answers each
with a `Reply` and UTF-8 text. Nothing that comes from the worker is unpickled.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, BinaryIO

from cbatch_cli.text.rendering import (
    ChatRenderer,
    RowRenderer,
    describe_compile_error,
    describe_error,
    import_libraries,
)

BLOB_HEADER = struct.Struct(">Q")
FRAME_HEADER = struct.Struct(">I")
REPLY_HEADER = struct.Struct(">BQ")


class Reply(IntEnum):
    """First byte of what the worker answers."""

    TEXT = 0
    FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderLimits:
    """What one rendering may cost."""

    cpu_seconds: float = 5.0
    memory_bytes: int = 2**30
    """Above what the worker holds when it is ready. On Linux; elsewhere there is no limit."""
    output_bytes: int = 64 * 2**20
    """Size of the rendered text in UTF-8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a worker is told first. At least one of the templates is set."""

    limits: RenderLimits
    row_template: str | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, Any]
    """The tokenizer's own, which chat templates write out."""


def main() -> None:
    """Serve renderings on stdin and stdout until the parent closes them."""
    # The parent decides when to stop: a signal to the whole group would fail the rows in flight.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = _take_over_stdio()
    setup: WorkerSetup = pickle.loads(_read_blob(requests))
    import_libraries(chat=setup.chat_template is not None)
    # Jinja evaluates constant expressions when it compiles.
    _limit_memory(setup.limits.memory_bytes)
    with CpuLimit(setup.limits.cpu_seconds):
        renderers, problem = _compile(setup)
    if problem:
        _reply(replies, Reply.FAILED, problem.encode(errors="replace"))
        return
    _reply(replies, Reply.TEXT, b"")
    while header := requests.read(FRAME_HEADER.size):
        (num_rows,) = FRAME_HEADER.unpack(header)
        for blob in [_read_blob(requests) for _ in range(num_rows)]:
            _reply(replies, *_render(blob, renderers, setup.limits))


def _compile(setup: WorkerSetup) -> tuple[dict[str, RowRenderer | ChatRenderer], str]:
    """The renderers by kind, and what is wrong with a template if anything is."""
    renderers: dict[str, RowRenderer | ChatRenderer] = {}
    owner = "--template"
    try:
        if setup.row_template is not None:
            renderers["row"] = RowRenderer(setup.row_template)
        owner = "the model's chat template"
        if setup.chat_template is not None:
            renderers["chat"] = ChatRenderer(setup.chat_template, setup.special_tokens)
    except Exception as error:
        return {}, f"{owner} does not compile: {describe_compile_error(error)}"
    return renderers, ""


def _render(
    blob: bytes, renderers: Mapping[str, RowRenderer | ChatRenderer], limits: RenderLimits
) -> tuple[Reply, bytes]:
    source = ""
    try:
        with CpuLimit(limits.cpu_seconds):
            kind, values = pickle.loads(blob)
            renderer = renderers[kind]
            source = renderer.source
            render: Callable[[Any], str] = renderer.render
            text = render(values).encode()
    except UnicodeEncodeError:
        return Reply.FAILED, b"the template renders text that is not valid Unicode"
    except Exception as error:
        return Reply.FAILED, describe_error(error, source).encode(errors="replace")
    if len(text) > limits.output_bytes:
        message = f"the template renders {len(text)} bytes; the limit is {limits.output_bytes}"
        return Reply.FAILED, message.encode()
    return Reply.TEXT, text


class CpuLimit:
    """Lets the kernel end this process after so many seconds of CPU time.

    CPU time and not the clock: a machine that is busy or was suspended fails no row.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(num_bytes: int) -> None:
    """Refuse allocations that would take the process `num_bytes` above what it holds now."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            held = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return
    limit = held * 1024 + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes, where nothing that a library prints can reach them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, replies


def _read_blob(stream: BinaryIO) -> bytes:
    (length,) = BLOB_HEADER.unpack(stream.read(BLOB_HEADER.size))
    return stream.read(length)


def _reply(stream: BinaryIO, reply: Reply, payload: bytes) -> None:
    stream.write(REPLY_HEADER.pack(reply, len(payload)) + payload)
    stream.flush()
