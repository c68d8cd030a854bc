"""What a power failure may leave of a disk, given the steps that were taken on it.

A file's bytes are sure up to its last fsync; of the rest any part may be there, or zeros or
garbage in its place. A name is sure once its folder was synced; of the changes since then any may
be lost, though those of one name come in order, and a rename inside of a folder is one change.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.crash.child import SHADOW


class _Change(NamedTuple):
    """Names of one folder, each with the file that it leads to from now on, 0 for none."""

    names: dict[str, int]


class _Begun(NamedTuple):
    """A step that a thread has begun; of a folder also how many changes there were by then."""

    kind: str
    path: str
    inode: int
    source: str
    size: int
    num_changes: int


class Disk:
    """The disk under `store`; `folder` holds `trace.log` and the links to every file."""

    def __init__(self, folder: Path, store: Path) -> None:
        self._trace = folder / "trace.log"
        self._shadow = folder / SHADOW
        self._store = store
        self._synced: dict[int, int] = {}
        """Bytes of each file that are sure."""
        self._sure: dict[str, dict[str, int]] = defaultdict(dict)
        """Names of each folder that are sure."""
        self._pending: dict[str, list[_Change]] = defaultdict(list)
        self._folders: set[int] = set()
        self.take_as_it_is()

    def take_as_it_is(self) -> None:
        """What is on the disk now is all that there is, and it is sure."""
        self._trace.unlink(missing_ok=True)
        shutil.rmtree(self._shadow, ignore_errors=True)
        self._shadow.mkdir()
        self._synced.clear()
        self._sure.clear()
        self._pending.clear()
        self._folders.clear()
        for folder, folders, files in os.walk(self._store):
            self._sure[folder] = {}
            for name in [*folders, *files]:
                status = os.lstat(os.path.join(folder, name))
                self._sure[folder][name] = status.st_ino
                self._synced[status.st_ino] = status.st_size
                if name in folders:
                    self._folders.add(status.st_ino)
                else:
                    os.link(os.path.join(folder, name), self._shadow / str(status.st_ino))

    def fail_power(self, rng: random.Random) -> None:
        """Replace what is under `store` by what a power failure could leave of it."""
        self._replay()
        image = self._store.with_name("image")
        self._copy(str(self._store), image, rng)
        shutil.rmtree(self._store)
        image.rename(self._store)
        self.take_as_it_is()

    def _replay(self) -> None:
        """Follow the steps that were logged."""
        # A thread takes one step at a time; two may sync the same folder, and end in any order.
        begun: dict[int, _Begun] = {}
        num_sure: dict[str, int] = defaultdict(int)
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        for step, path, inode, size, source, thread in map(json.loads, lines):
            folder, name = os.path.split(path)
            moment, kind = step.split(" ", 1)
            if moment == "before":
                num_changes = num_sure[path] + len(self._pending[path])
                begun[thread] = _Begun(kind, path, inode, source, size, num_changes)
                continue
            start = begun.pop(thread)
            assert (start.kind, start.path) == (kind, path)
            self._apply(kind, folder, name, start.inode, start.source, inode)
            if kind == "fsync":
                self._synced[inode] = max(self._synced.get(inode, 0), start.size)
            elif kind == "fsync dir":
                num_new = max(0, start.num_changes - num_sure[path])
                for change in self._pending[path][:num_new]:
                    self._sure[path].update(change.names)
                del self._pending[path][:num_new]
                num_sure[path] += num_new
        for kind, path, inode, source, _, _ in begun.values():
            # Whether a step was taken that the process did not live to tell, the disk knows.
            folder, name = os.path.split(path)
            now = _inode(path)
            if (kind == "rename" and now == inode) or (kind in ("unlink", "rmdir") and not now):
                self._apply(kind, folder, name, inode, source, now)
            elif kind in ("open", "mkdir") and now and not inode:
                self._apply(kind, folder, name, inode, source, now)
                if kind == "open" and not (self._shadow / str(now)).exists():
                    os.link(path, self._shadow / str(now))

    def _apply(
        self, kind: str, folder: str, name: str, before: int, source: str, after: int
    ) -> None:
        pending = self._pending[folder]
        match kind:
            case "open":
                pending.append(_Change({name: after}))
                self._synced.setdefault(after, 0)
                # A removed folder's number is given to the next file.
                self._folders.discard(after)
            case "mkdir":
                pending.append(_Change({name: after}))
                self._folders.add(after)
            case "unlink" | "rmdir" if before and not after:
                pending.append(_Change({name: 0}))
            case "rename":
                source_folder, source_name = os.path.split(source)
                if source_folder == folder:
                    pending.append(_Change({name: before, source_name: 0}))
                else:
                    pending.append(_Change({name: before}))
                    self._pending[source_folder].append(_Change({source_name: 0}))

    def _copy(self, folder: str, image: Path, rng: random.Random) -> None:
        image.mkdir()
        for name, inode in self._names(folder, rng).items():
            if not inode or name == "lock":
                continue
            if inode in self._folders:
                self._copy(os.path.join(folder, name), image / name, rng)
            else:
                (image / name).write_bytes(self._content(inode, rng))

    def _names(self, folder: str, rng: random.Random) -> dict[str, int]:
        names = dict(self._sure[folder])
        pending = self._pending[folder]
        if rng.random() < 0.5:
            for change in pending[: rng.randint(0, len(pending))]:
                names.update(change.names)
            return names
        lost: set[str] = set()
        for change in pending:
            if lost & change.names.keys() or rng.random() < 0.5:
                lost |= change.names.keys()
            else:
                names.update(change.names)
        return names

    def _content(self, inode: int, rng: random.Random) -> bytes:
        data = (self._shadow / str(inode)).read_bytes()
        sure = self._synced.get(inode, 0)
        data, rest = data[:sure], data[sure:]
        cut = rng.choice((0, len(rest), rng.randint(0, len(rest))))
        lost = rest[cut:]
        tail = rng.choice((b"", bytes(len(lost)), rng.randbytes(len(lost))))
        return data + rest[:cut] + tail


def _inode(path: str) -> int:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return 0
