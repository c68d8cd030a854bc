"""Every change to the output side of the file system, one named step at a time.

Nothing else in the package writes, syncs, renames or removes an output-side file. Each step calls
`on_step` before and after it acts, so that a test can stop the process, or make the operating
system fail, at every point a crash could pick. The names are `before X` and `after X` with X one
of `list`, `mkdir`, `rmdir`, `lock`, `open`, `write`, `fsync`, `fsync dir`, `rename`, `unlink`.

What can be relied on afterwards is the order: a file is synced before it is renamed, and its
folder is synced after, so a name always leads to whole content.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch_cli.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOCK_PATIENCE_S = 0.25
"""How long a lock that is taken is asked for: whoever looks whether it is free has it too."""

StepHook = Callable[[str, Path], None]
"""Called with the name of a step and the path it acts on, on the thread that takes the step."""


def _continue(step: str, path: Path) -> None:
    """Let the step happen."""


on_step: StepHook = _continue


@contextmanager
def _step(name: str, path: Path) -> Iterator[None]:
    try:
        on_step(f"before {name}", path)
        yield
        on_step(f"after {name}", path)
    except OSError as error:
        raise OutputError(f"cannot {name} {path}: {error.strerror or error}") from error


class DurableFile(io.RawIOBase):
    """A new file, written from start to end; `fsync` makes what was written survive power loss.

    Raises `OutputError` naming the path: also when the file exists, since nothing may be appended
    to bytes whose history is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._position = 0
        with _step("open", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o666)

    def write(self, data: ReadableBuffer, /) -> int:
        """Hand all of `data` to the operating system, in one call unless it takes less at once."""
        view = memoryview(data).cast("B")
        with _step("write", self.path):
            written = 0
            while written < len(view):
                written += os.write(self._fd, view[written:])
        self._position += len(view)
        return len(view)

    def fsync(self) -> None:
        """Return once everything written before the call is on the device."""
        with _step("fsync", self.path):
            os.fsync(self._fd)

    def tell(self) -> int:
        """Number of bytes written."""
        return self._position

    def writable(self) -> bool:
        """Always true."""
        return True

    def close(self) -> None:
        """Release the file without syncing it. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


def write_durably(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, at once and for good: a reader sees the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    unlink(temporary)
    with DurableFile(temporary) as file:
        file.write(data)
        file.fsync()
    replace(temporary, path)


def replace(source: Path, destination: Path) -> None:
    """Give a synced file its final name, in place of what had that name, and sync the folder."""
    with _step("rename", destination):
        os.replace(source, destination)
    fsync_dir(destination.parent)


def fsync_dir(path: Path) -> None:
    """Make the names in the folder `path` survive power loss."""
    with _step("fsync dir", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some file systems have no notion of syncing a folder and say so in this way.
            if error.errno not in (errno.EINVAL, errno.EBADF):
                raise
        finally:
            os.close(fd)


def unlink(path: Path) -> None:
    """Remove a file if it is there. Whether the removal survives power loss is left open."""
    with _step("unlink", path):
        path.unlink(missing_ok=True)


def list_dir(path: Path) -> list[str]:
    """The names in a folder, sorted."""
    with _step("list", path):
        return sorted(os.listdir(path))


def make_dir(path: Path) -> None:
    """Create a folder and the folders above it where they are missing."""
    if path.is_dir():
        return
    parent = path.absolute().parent
    make_dir(parent)
    with _step("mkdir", path):
        path.mkdir(exist_ok=True)
    fsync_dir(parent)


def remove_empty_dir(path: Path) -> None:
    """Remove a folder unless it holds something."""
    with _step("rmdir", path):
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def lock(path: Path) -> int | None:
    """Take the lock file `path` for this process: a descriptor to close, None if it is taken.

    The kernel frees it when the process dies. The file holds the process id of its owner.
    """
    give_up_s = time.monotonic() + LOCK_PATIENCE_S
    with _step("lock", path):
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner before us may have removed the file between our two calls:
                # a lock on a file that has lost its name keeps nobody out.
                if _is_named(fd, path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                    return fd
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() > give_up_s:
                    return None
                time.sleep(LOCK_PATIENCE_S / 25)
                continue
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a process has the lock file `path`; nothing is made or changed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError(f"cannot open {path}: {error.strerror or error}") from error
    try:
        # Shared, so that many may ask at once. For the moment in which it is held nobody can take
        # the lock, which is why that takes a little patience.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
