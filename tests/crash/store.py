"""A job's files in a folder of their own, runs of the job, and what must be true of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cbatch_cli.data.output_target import OutputTarget
from tests.crash.child import SHADOW
from tests.crash.fork_server import ForkServer, Outcome, Run

ROWS_PER_PART = 4
BAD_ROW = 7
"""Every so manieth line of the input is not JSON."""


@dataclass(frozen=True)
class Answer:
    """What a run made of a row; the time tells it from the same answer made again."""

    completion: str | None
    finished_at: str | None


@dataclass
class Counts:
    """What a harness has done; printed at its end."""

    runs: int = 0
    kills: int = 0
    images: int = 0
    faults: int = 0
    rows_checked: int = 0
    rows_lost: int = 0
    """Finished rows that a power failure took, and that ran again."""
    most_rows_lost: int = 0
    reads: int = 0
    half_files: int = 0

    def __str__(self) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {value:,}" for name, value in vars(self).items()
        )


@dataclass
class History:
    """What the logs say of the rows."""

    made: dict[int, set[Answer]] = field(default_factory=dict)
    """Every answer that a run had made."""
    kept: dict[int, Answer] = field(default_factory=dict)
    """The answers that must not be lost, nor be made again."""
    durable: set[int] = field(default_factory=set)
    """Rows whose answer survives a power failure."""
    unconfirmed: set[int] = field(default_factory=set)
    """Rows that a power failure may have taken."""

    def read_run(self, lines: list[list[Any]], counts: Counts) -> None:
        """Take in what one run has logged, and check that it has run no finished row."""
        resumed: dict[int, str] = {}
        making: dict[int, Answer] = {}
        given_again = 0
        for kind, *values in lines:
            match kind:
                case "given":
                    row, resumed_text, attempt = values
                    assert row not in self.kept, f"row {row} runs again"
                    assert row not in resumed, f"row {row} runs twice"
                    assert (attempt > 1) == bool(resumed_text)
                    given_again += row in self.unconfirmed
                    resumed[row] = resumed_text
                case "done":
                    row, completion, finished_at = values
                    assert row not in self.kept and row not in making, f"row {row} ends again"
                    if completion is not None:
                        assert completion.startswith(resumed[row]), f"row {row} forgot its ids"
                    making[row] = Answer(completion, finished_at)
                    self.made.setdefault(row, set()).add(making[row])
                case "kept":
                    (row,) = values
                    self.kept[row] = making[row]
                case "durable":
                    self.durable.update(values[0])
        self.unconfirmed -= self.kept.keys()
        counts.rows_lost += given_again
        counts.most_rows_lost = max(counts.most_rows_lost, given_again)

    def fail_power(self) -> None:
        """From now on only what was durable must be there."""
        for row in self.kept.keys() - self.durable:
            del self.kept[row]
            self.unconfirmed.add(row)


class Store:
    """A job over `num_rows` rows; `store` holds its output, the logs lie beside it."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        *,
        is_directory: bool,
        counts: Counts,
        num_rows: int = 10,
        rows_per_part: int = ROWS_PER_PART,
        **options: Any,
    ) -> None:
        self.server = server
        self.folder = folder
        self.num_rows = num_rows
        self.rows_per_part = rows_per_part
        self.counts = counts
        self.history = History()
        self.store = folder / "store"
        self.store.mkdir(parents=True)
        self.source = folder / "in.jsonl"
        self.source.write_bytes(b"".join(_line(row) for row in range(num_rows)))
        path = self.store / ("out" if is_directory else "out.parquet")
        self.target = OutputTarget(path=path, is_directory=is_directory)
        self.options = {
            "inputs": [str(self.source)],
            "output": f"{path}/" if is_directory else str(path),
            "max_tokens": 4,
            "rows_per_part": rows_per_part,
            **options,
        }
        self._salt = 0
        self._num_log_bytes = 0

    def run(self, **what: Any) -> Outcome:
        """One run, after which its logs are checked."""
        self.start(**what)
        return self.wait()

    def start(self, **what: Any) -> None:
        """Begin a run, for `wait` to end."""
        self._salt += 1
        options = {**self.options, **what.pop("options", {})}
        self.server.start(Run(folder=str(self.folder), options=options, salt=self._salt, **what))

    def wait(self) -> Outcome:
        """The outcome of the run that was started, its logs checked."""
        outcome = self.server.wait()
        self.counts.runs += 1
        self.counts.kills += outcome.was_killed
        assert not outcome.is_hung, self.errors
        self.history.read_run(self._new_log_lines(), self.counts)
        return outcome

    def finish(self, **what: Any) -> None:
        """Run to the end, and check every row of the output."""
        outcome = self.run(**what)
        assert outcome.exit_code == 0, self.errors
        self.check_output()

    @property
    def errors(self) -> str:
        """What the runs said on stderr."""
        path = self.folder / "errors.txt"
        return path.read_text()[-3000:] if path.exists() else ""

    def copy(self, folder: Path) -> Store:
        """The same job with the same past, in another folder."""
        copied = Store(
            self.server,
            folder,
            is_directory=self.target.is_directory,
            counts=self.counts,
            num_rows=self.num_rows,
            rows_per_part=self.rows_per_part,
        )
        shutil.copytree(self.store, copied.store, dirs_exist_ok=True)
        shutil.copy2(self.source, copied.source)
        copied.options = {**self.options, **{k: copied.options[k] for k in ("inputs", "output")}}
        copied.history = History(
            {row: set(answers) for row, answers in self.history.made.items()},
            dict(self.history.kept),
            set(self.history.durable),
        )
        copied._salt = self._salt
        return copied

    def check_output(self) -> None:
        """No row is missing, double or changed; nothing of the run is left over."""
        self.check_answers()
        assert os.listdir(self.target.work_dir) == ["run.json"]

    def check_answers(self) -> None:
        """No row is missing, double or changed."""
        rows = self.answers()
        assert [row["row_index"] for row in rows] == list(range(self.num_rows))
        for row in rows:
            self._check_row(row)
        self.counts.rows_checked += len(rows)

    def answers(self) -> list[dict[str, Any]]:
        """All rows of the output."""
        return read_rows(self.target.path)

    def check_whole(self) -> None:
        """What a reader could see now is complete."""
        if not self.target.is_directory:
            if self.target.path.exists():
                rows = read_rows(self.target.path)
                assert [row["row_index"] for row in rows] == list(range(self.num_rows))
            return
        for path in self.target.path.glob("*"):
            number = self.target.part_number(path.name)
            assert number is not None, f"{path} is no part"
            first = number * self.rows_per_part
            last = min(first + self.rows_per_part, self.num_rows)
            rows = read_rows(path)
            assert [row["row_index"] for row in rows] == list(range(first, last))

    def forget_logs(self) -> None:
        """Drop the trace of steps, when the present state of the disk is what there is."""
        (self.folder / "trace.log").unlink(missing_ok=True)
        shutil.rmtree(self.folder / SHADOW, ignore_errors=True)

    def _check_row(self, row: Mapping[str, Any]) -> None:
        index = row["row_index"]
        finished_at: datetime | None = row["metrics"]["finished_at"]
        answer = Answer(row["completion"], finished_at and finished_at.isoformat())
        made = {_to_microseconds(answer) for answer in self.history.made[index]}
        assert _to_microseconds(answer) in made, f"row {index} has an answer nobody made"
        if index in self.history.kept:
            kept = _to_microseconds(self.history.kept[index])
            assert _to_microseconds(answer) == kept, f"row {index} has changed"
        if index % BAD_ROW == BAD_ROW - 1:
            assert row["error"]["type"] == "invalid_json" and row["prompt"] is None
        else:
            assert row["prompt"] == f"prompt {index}" and row["id"] == index
            assert len(row["completion"]) == self.options["max_tokens"]

    def _new_log_lines(self) -> list[list[Any]]:
        path = self.folder / "rows.log"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._num_log_bytes)
            data = file.read()
        self._num_log_bytes += len(data)
        return [json.loads(line) for line in data.splitlines()]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a file or a folder holds, checksums checked."""
    table = pq.read_table(path, page_checksum_verification=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _line(row: int) -> bytes:
    if row % BAD_ROW == BAD_ROW - 1:
        return f"not JSON {row}\n".encode()
    return json.dumps({"id": row, "prompt": f"prompt {row}"}).encode() + b"\n"


def _to_microseconds(answer: Answer) -> Answer:
    at = answer.finished_at
    return Answer(answer.completion, at and datetime.fromisoformat(at).isoformat())
