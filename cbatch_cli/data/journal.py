"""The journal: a finished row is safe before its part is complete.

A row is handed to the operating system by one write as soon as it is finished, so that the death
of the process does not lose it; a thread syncs the file every 64 rows or every second, so that a
power failure loses no more than that. Each start writes a segment of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cbatch_cli.data import durable_io
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.data.journal_records import (
    MAGIC,
    JournaledPartial,
    JournaledResult,
    JournalEntry,
    encode_record,
    segment_name,
)
from cbatch_cli.data.journal_replay import Replay, replay
from cbatch_cli.data.row import RowResult

SYNC_ROWS = 64
SYNC_INTERVAL_S = 1.0
MAX_UNSYNCED_ROWS = 256
"""Where the device is this far behind, whoever appends waits for it."""
SEGMENT_BYTES = 64 * 2**20
"""A segment is followed by a new one beyond this size, so that old ones can be dropped."""


def _ignore_rows(rows: Sequence[int]) -> None:
    """Nobody waits for rows to be durable."""


@dataclass(slots=True)
class _Segment:
    path: Path
    rows: set[int] = field(default_factory=set)
    """Rows it has records of that are in no renamed part yet."""


class Journal:
    """The journal of a running job. Rows may be appended and dropped from different threads.

    After a failed write or sync nothing more is written, since the end of the file is in an
    unknown state and what a failed sync was to save may be gone: the error is raised then and
    from every later call but `close`.
    """

    def __init__(
        self, directory: Path, *, recovered: Replay, on_durable: Callable[[Sequence[int]], None]
    ) -> None:
        self.recovered = recovered
        """What earlier runs left."""
        self.num_durable = 0
        """Results of this run that would survive a power failure."""
        self._directory = directory
        self._on_durable = on_durable
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._is_failure_told = False
        self._is_closing = False
        # Records of this run, each count at most the one before it. What is between the first two
        # is with the operating system only; between the last two, on its way to the device.
        self._num_written = 0
        self._num_sync_begun = 0
        self._num_synced = 0
        self._num_sync_wanted = 0
        """Records that somebody waits for, not to be held back for company."""
        self._new_rows: list[int] = []
        """Rows of the results that no sync has begun to make durable."""
        self._oldest_s = 0.0
        """When the first record that no sync has begun to make durable was written."""
        self._old_segments = [
            _Segment(segment.path, set(segment.rows)) for segment in recovered.segments
        ]
        self._last_number = max((segment.number for segment in recovered.segments), default=0)
        self._segment, self._file = self._new_segment()
        self._drop_empty_segments()
        self._thread = threading.Thread(target=self._work, name="cbatch-journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, directory: Path, *, on_durable: Callable[[Sequence[int]], None] = _ignore_rows
    ) -> Self:
        """Read what earlier runs left in `directory` and start a segment of this run.

        `on_durable` is called, on a thread of the journal, with the indices of finished rows that
        from then on survive a power failure. Raises `OutputError`.
        """
        return cls(directory, recovered=replay(directory), on_durable=on_durable)

    def append_result(self, row_index: int, content_hash: bytes, result: RowResult) -> None:
        """Store a finished row; on return it survives the death of the process."""
        assert result.row_index == row_index
        self._append(JournaledResult(content_hash=content_hash, result=result))

    def append_partial(
        self, row_index: int, content_hash: bytes, token_ids: Sequence[int], attempt: int
    ) -> None:
        """Store the output ids of a row that is being interrupted in its attempt `attempt`."""
        self._append(
            JournaledPartial(
                row_index=row_index,
                content_hash=content_hash,
                token_ids=tuple(token_ids),
                attempt=attempt,
            )
        )

    def sync(self) -> None:
        """Return once everything appended so far survives a power failure."""
        with self._changed:
            wanted = self._num_sync_wanted = self._num_written
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or self._num_synced >= wanted)
            self._raise_failure()

    def drop(self, rows: range) -> None:
        """Forget rows that are in a part that survives a power failure.

        Segments that hold no other rows are removed.
        """
        with self._changed:
            self._raise_failure()
            for segment in [*self._old_segments, self._segment]:
                segment.rows.difference_update(rows)
            self._drop_empty_segments()

    def close(self) -> None:
        """Make everything durable and end. May be called again.

        Raises the error of a failed write or sync if no call has raised it before.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._file.close()
        if not self._is_failure_told:
            self._raise_failure()

    def _append(self, entry: JournalEntry) -> None:
        record = encode_record(entry)
        with self._changed:
            self._changed.wait_for(self._can_append)
            self._raise_failure()
            try:
                self._file.write(record)
            except BaseException as error:
                self._failure = error
                self._is_failure_told = True
                raise
            self._segment.rows.add(entry.row_index)
            if isinstance(entry, JournaledResult):
                self._new_rows.append(entry.row_index)
            self._num_written += 1
            num_waiting = self._num_written - self._num_sync_begun
            if num_waiting == 1:
                self._oldest_s = time.monotonic()
            if num_waiting in (1, SYNC_ROWS):
                self._changed.notify_all()

    def _can_append(self) -> bool:
        is_behind = self._num_written - self._num_synced >= MAX_UNSYNCED_ROWS
        return self._failure is not None or not is_behind

    def _work(self) -> None:
        """Sync whenever it is due, until `close`; ends at the first failure."""
        try:
            while self._wait_until_due():
                self._sync_once()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _wait_until_due(self) -> bool:
        """Whether there is something to sync; False once there will never be."""
        with self._changed:
            while True:
                num_waiting = self._num_written - self._num_sync_begun
                if num_waiting == 0:
                    if self._is_closing:
                        return False
                    self._changed.wait()
                    continue
                wait_s = self._oldest_s + SYNC_INTERVAL_S - time.monotonic()
                is_wanted = self._is_closing or self._num_sync_wanted > self._num_sync_begun
                if is_wanted or num_waiting >= SYNC_ROWS or wait_s <= 0:
                    return True
                self._changed.wait(wait_s)

    def _sync_once(self) -> None:
        """Make what is written durable; rows that finish meanwhile are written behind it."""
        with self._changed:
            rows = self._begin_sync()
            num_records = self._num_sync_begun
        self._file.fsync()
        self._on_durable(rows)
        with self._changed:
            if self._file.tell() >= SEGMENT_BYTES:
                more_rows = self._begin_sync()
                num_records = self._num_sync_begun
                self._file.fsync()
                self._on_durable(more_rows)
                rows += more_rows
                self._start_next_segment()
            self._num_synced = num_records
            self.num_durable += len(rows)
            self._changed.notify_all()

    def _begin_sync(self) -> list[int]:
        rows, self._new_rows = self._new_rows, []
        self._num_sync_begun = self._num_written
        return rows

    def _start_next_segment(self) -> None:
        # Opened before the other is closed: should it fail, there is a file to fail with.
        segment, file = self._new_segment()
        self._file.close()
        self._old_segments.append(self._segment)
        self._segment, self._file = segment, file
        self._drop_empty_segments()

    def _new_segment(self) -> tuple[_Segment, DurableFile]:
        self._last_number += 1
        path = self._directory / segment_name(self._last_number)
        file = DurableFile(path)
        file.write(MAGIC)
        file.fsync()
        durable_io.fsync_dir(self._directory)
        return _Segment(path), file

    def _drop_empty_segments(self) -> None:
        for segment in self._old_segments:
            if not segment.rows:
                durable_io.unlink(segment.path)
        self._old_segments = [segment for segment in self._old_segments if segment.rows]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._is_failure_told = True
            raise self._failure
