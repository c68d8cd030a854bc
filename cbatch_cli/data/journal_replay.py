"""What the journal of runs that died still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cbatch_cli.data import durable_io
from cbatch_cli.data.journal_records import (
    JournaledPartial,
    JournaledResult,
    read_entry,
    read_segment,
    segment_number,
)


@dataclass(frozen=True, slots=True)
class ReplayedSegment:
    """A segment that was found, and the rows that it has records of."""

    number: int
    path: Path
    rows: set[int]


class _Location(NamedTuple):
    path: Path
    offset: int
    is_answer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The finished rows and the partial generations of a journal.

    Results stay on disk until they are asked for: only their places are in memory.
    """

    segments: Sequence[ReplayedSegment]
    """In the order in which they were written."""
    results: Mapping[int, _Location]
    """Where the result of each finished row is, by row index."""
    partials: Mapping[int, JournaledPartial]
    """The last ids saved of each row that has no result, by row index."""

    def result(self, row_index: int) -> JournaledResult | None:
        """The result of a row: its first answer, or its first error where it has none.

        Raises `OutputError` if the segment can no longer be read.
        """
        location = self.results.get(row_index)
        if location is None:
            return None
        entry = read_entry(location.path, location.offset)
        assert isinstance(entry, JournaledResult)
        return entry


def replay(directory: Path) -> Replay:
    """Read every segment in `directory`, each up to its first bad record.

    Raises `OutputError` if a file cannot be read at all.
    """
    segments: list[ReplayedSegment] = []
    results: dict[int, _Location] = {}
    partials: dict[int, JournaledPartial] = {}
    numbers = [(segment_number(name), name) for name in durable_io.list_dir(directory)]
    for number, name in sorted((number, name) for number, name in numbers if number is not None):
        segment = ReplayedSegment(number, directory / name, set())
        segments.append(segment)
        for offset, entry in read_segment(segment.path):
            segment.rows.add(entry.row_index)
            known = results.get(entry.row_index)
            if isinstance(entry, JournaledResult):
                is_answer = entry.result.error is None
                # The first one counts, except that an answer makes up for an earlier failure.
                if known is None or (is_answer and not known.is_answer):
                    results[entry.row_index] = _Location(segment.path, offset, is_answer)
                partials.pop(entry.row_index, None)
            elif known is not None and known.is_answer:
                continue
            else:
                partials[entry.row_index] = entry
    return Replay(segments=segments, results=results, partials=partials)
