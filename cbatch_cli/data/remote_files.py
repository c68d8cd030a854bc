"""Files behind a URL, through fsspec; whatever such a file system raises comes as `OSError`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BUFFER_BYTES = 2**20

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_WEB = re.compile(r"https?://", re.IGNORECASE)


def is_url(location: str) -> bool:
    """Whether fsspec must open it."""
    return _URL.match(location) is not None


def url_path(url: str) -> str:
    """The part of `url` that a suffix can be read from."""
    return re.split(r"[?#]", url, maxsplit=1)[0] if _WEB.match(url) else url


def open_url(url: str) -> io.BufferedReader:
    """The raw bytes behind `url`."""
    with _as_os_error():
        file_system, path = _file_system(url)
        return io.BufferedReader(_RemoteFile(file_system.open(path, "rb")), BUFFER_BYTES)


def url_size(url: str) -> int | None:
    """Length in bytes; None where the file system cannot tell."""
    with _as_os_error():
        file_system, path = _file_system(url)
        size: int | None = file_system.size(path)
        return size


def list_urls(url: str) -> tuple[list[str], str | None]:
    """The files that `url` names: itself, those a glob matches, or all under a folder.

    The second value is the folder, with a slash at its end, if it is one.
    """
    if _WEB.match(url):  # a web server knows neither globs nor folders
        return [url], None
    with _as_os_error():
        file_system, path = _file_system(url)
        if file_system.isfile(path):
            return [url], None
        if any(character in path for character in "*?["):
            found = [name for name in file_system.glob(path) if file_system.isfile(name)]
            return [file_system.unstrip_protocol(name) for name in found], None
        if not file_system.isdir(path):
            raise FileNotFoundError("no such file or folder")
        found = [file_system.unstrip_protocol(name) for name in file_system.find(path)]
        return found, file_system.unstrip_protocol(path).rstrip("/") + "/"


class _RemoteFile(io.RawIOBase):
    """A file of fsspec with errors of one kind."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._inner.seekable()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        with _as_os_error():
            data = self._inner.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with _as_os_error():
            return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    file_system, path = fsspec.core.url_to_fs(url)
    return file_system, path


@contextmanager
def _as_os_error() -> Iterator[None]:
    """File systems raise what their client libraries raise; to a reader all of it means I/O."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
