"""Where the run of an output stands, from its files alone: it may be running, dead or done."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from cbatch_cli.data import durable_io
from cbatch_cli.data.journal_records import (
    SEGMENT_NAME,
    JournaledResult,
    StoredEntry,
    read_segment,
)
from cbatch_cli.data.output_target import OutputTarget, named_target
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.data.part_info import PART_KEY, PartInfo
from cbatch_cli.data.shard_targets import find_shards
from cbatch_cli.data.work_dir import is_in_use, owner, read_run
from cbatch_cli.errors import OutputError, UsageError
from cbatch_cli.resume import done_summary
from cbatch_cli.shard import WHOLE, Shard, parse_shard

State = Literal["running", "interrupted", "done"]


@dataclass(kw_only=True, slots=True)
class RunStatus:
    """Where one run stands."""

    output: str
    state: State
    pid: int | None = None
    """Process of a run that is running, on the machine where it runs."""
    shard: str | None = None
    rows: int = 0
    """Rows that have ended, and will not be run again."""
    rows_failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    rows_in_parts: int = 0
    parts: int = 0
    """Files whose rows are all done; a single file is made of them at the end."""
    rows_in_journal: int = 0
    """Rows that are in no part yet."""
    partial_generations: int = 0
    """Rows that go on in their middle when the run is resumed."""
    input_fraction: float | None = None
    """Share of the rows that are done, 0 to 1; None where the files do not tell."""
    last_record_age_s: float | None = None
    """Seconds since a row or a part was last written."""


def read_status(output: str) -> list[RunStatus]:
    """The status of the run of `output`, or of its shards where there is none of the whole.

    Nothing is changed, and a run that is running is not disturbed. Raises `UsageError` if there
    is nothing, `OutputError` for files that cannot be read.
    """
    target = named_target(output)
    whole = _read_status(target)
    if whole is not None:
        return [whole]
    shards = [_read_status(shard) for shard in find_shards(target).values()]
    found = [status for status in shards if status is not None]
    if not found:
        raise UsageError(f"there is no output of a run at {target.path}, nor one that was begun")
    return found


def status_dict(statuses: list[RunStatus]) -> dict[str, Any]:
    """For JSON: the status of the one run, or those of shards under `shards`."""
    if len(statuses) == 1 and statuses[0].shard is None:
        return asdict(statuses[0])
    return {"shards": [asdict(status) for status in statuses]}


def status_text(statuses: list[RunStatus]) -> str:
    """For people: some lines on each run."""
    return "\n".join(_text(status) for status in statuses)


def _read_status(target: OutputTarget) -> RunStatus | None:
    is_running = is_in_use(target.work_dir)
    run = read_run(target.work_dir)
    if run is None and not is_running:
        return _moved_output(target)
    # Before the parts: a row that goes from the journal to a part meanwhile is then seen twice,
    # which does no harm, and not missed.
    journal = _Journal(target.work_dir)
    parts = _read_parts(target)
    status = RunStatus(
        output=str(target.path),
        state="running" if is_running else "interrupted",
        pid=owner(target.work_dir) if is_running else None,
        last_record_age_s=_age(target),
    )
    if run is None:
        return status
    status.shard = run["fingerprint"].get("shard")
    summary = done_summary(run, target)
    if summary is not None and not is_running:
        return _done(status, summary, len(parts))
    if run["summary"] is not None and not is_running:
        return None  # the answers of a run that was done have been taken away
    _count(status, run, parts, journal)
    return status


def _count(
    status: RunStatus, run: Mapping[str, Any], parts: Mapping[int, PartInfo], journal: _Journal
) -> None:
    rows_per_part = run["fingerprint"]["rows_per_part"]
    rest = {
        row: error for row, error in journal.results.items() if row // rows_per_part not in parts
    }
    errors = Counter(error for error in rest.values() if error is not None)
    for part in parts.values():
        errors.update(part.errors)
    status.parts = len(parts)
    status.rows_in_parts = sum(len(part.rows) for part in parts.values())
    status.rows_in_journal = len(rest)
    status.rows = status.rows_in_parts + status.rows_in_journal
    status.errors = dict(errors)
    status.rows_failed = errors.total()
    status.partial_generations = sum(row // rows_per_part not in parts for row in journal.partials)
    status.input_fraction = _input_fraction(run, parts, status.rows)


def _done(status: RunStatus, summary: Mapping[str, Any], num_parts: int) -> RunStatus:
    status.state = "done"
    status.rows = summary["rows"]
    status.rows_failed = summary["rows_failed"]
    status.errors = dict(summary["errors"])
    status.rows_in_parts = status.rows
    status.parts = num_parts
    status.input_fraction = 1.0
    return status


def _moved_output(target: OutputTarget) -> RunStatus | None:
    """Of an output without its work directory, which is whole if it tells of its totals."""
    if not target.path.exists():
        return None
    for path in target.files()[-1:]:
        totals = read_note(path, METADATA_KEY).get("totals")
        if totals is not None:
            status = RunStatus(
                output=str(target.path), state="done", last_record_age_s=_age(target)
            )
            if "shard" in totals:
                status.shard = f"{totals['shard']['index']}/{totals['shard']['count']}"
            return _done(status, totals, len(_read_parts(target)))
    return None


class _Journal:
    """What the journal says of each row, though a run may be writing it."""

    def __init__(self, directory: Path) -> None:
        self.results: dict[int, str | None] = {}
        """The error type of each finished row, None for an answer."""
        self.partials: set[int] = set()
        for name in durable_io.list_dir(directory) if directory.is_dir() else ():
            if SEGMENT_NAME.fullmatch(name):
                with _unless_gone():
                    self._take(read_segment(directory / name))

    def _take(self, entries: Iterable[StoredEntry]) -> None:
        for _, entry in entries:
            row = entry.row_index
            is_answered = row in self.results and self.results[row] is None
            if isinstance(entry, JournaledResult):
                error = entry.result.error
                self.partials.discard(row)
                # The first one counts, except that an answer makes up for an earlier failure.
                if error is None or row not in self.results:
                    self.results[row] = None if error is None else error.type.value
            elif not is_answered:
                self.partials.add(row)


def _read_parts(target: OutputTarget) -> dict[int, PartInfo]:
    """The parts by number, by what their footers say; none of their rows are read."""
    folder = target.part_path(0).parent
    parts: dict[int, PartInfo] = {}
    for name in durable_io.list_dir(folder) if folder.is_dir() else ():
        number = target.part_number(name)
        if number is not None:
            with suppress(KeyError, TypeError):
                parts[number] = PartInfo.from_dict(read_note(folder / name, PART_KEY))
    return parts


def _input_fraction(
    run: Mapping[str, Any], parts: Mapping[int, PartInfo], num_rows: int
) -> float | None:
    """The share done: of rows where their number is known, else of bytes as far as parts tell."""
    fingerprint = run["fingerprint"]
    shard = _shard(fingerprint.get("shard"))
    num_input_rows = run["num_input_rows"]
    if num_input_rows is not None:
        num_own = shard.num_rows(num_input_rows, fingerprint["rows_per_part"])
        return min(1.0, num_rows / num_own) if num_own else 1.0
    fractions = [_byte_fraction(fingerprint["inputs"], shard, parts, num_rows)]
    if fingerprint["limit"] is not None:
        most = shard.num_rows(fingerprint["limit"], fingerprint["rows_per_part"])
        fractions.append(min(1.0, num_rows / max(1, most)))
    return max((value for value in fractions if value is not None), default=None)


def _byte_fraction(
    inputs: Sequence[Mapping[str, Any]], shard: Shard, parts: Mapping[int, PartInfo], num_rows: int
) -> float | None:
    """Where the last of the parts that follow each other ends tells how long a row is."""
    first_parts = list(
        itertools.takewhile(parts.__contains__, shard.blocks(max(parts, default=-1)))
    )
    end = parts[first_parts[-1]].end if first_parts else None
    sizes = [file["size"] for file in inputs]
    if end is None or None in sizes or not sum(sizes):
        return None
    rows_up_to_end = sum(len(parts[number].rows) for number in first_parts)
    bytes_up_to_end = sum(sizes[: end.file]) + end.offset
    return float(min(1.0, bytes_up_to_end / sum(sizes) * num_rows / max(1, rows_up_to_end)))


def _age(target: OutputTarget) -> float | None:
    """Seconds since a journal or a part was last written."""
    times = []
    for folder in {target.work_dir, target.part_path(0).parent}:
        for name in durable_io.list_dir(folder) if folder.is_dir() else ():
            if SEGMENT_NAME.fullmatch(name) or target.part_number(name) is not None:
                with suppress(FileNotFoundError):
                    times.append((folder / name).stat().st_mtime)
    if not times and target.path.is_file():
        times.append(target.path.stat().st_mtime)
    return round(max(0.0, time.time() - max(times)), 3) if times else None


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Ends the block at a file that a run has removed meanwhile: its rows are in parts."""
    try:
        yield
    except OutputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def _shard(text: str | None) -> Shard:
    return WHOLE if text is None else parse_shard(text)


def _text(status: RunStatus) -> str:
    state = status.state if status.pid is None else f"{status.state}, process {status.pid}"
    by_type = ", ".join(f"{count:,} {name}" for name, count in status.errors.items())
    failed = f"{status.rows_failed:,} failed" + (f" ({by_type})" if by_type else "")
    lines = {
        "output": status.output,
        "state": state,
        "rows": f"{status.rows:,} done: {status.rows - status.rows_failed:,} ok, {failed}",
    }
    if status.state != "done":
        lines["kept"] = (
            f"{status.rows_in_parts:,} in {status.parts:,} parts, {status.rows_in_journal:,} in "
            f"the journal; {status.partial_generations:,} more are half generated"
        )
        fraction = status.input_fraction
        lines["input"] = "?" if fraction is None else f"{fraction:.1%} done"
    if status.last_record_age_s is not None:
        lines["last row"] = f"{timedelta(seconds=round(status.last_record_age_s))} ago"
    return "".join(f"{name:<10}{value}\n" for name, value in lines.items())
