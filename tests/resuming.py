"""Jobs over the null engine that are stopped, watched and resumed, all in this process."""

from __future__ import annotations

import dataclasses
import gzip
import json
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.assembly import EngineLoader, LoadedEngine, Log, print_nothing
from cbatch_cli.config import EngineConfig, build_job_config
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import RowError, RowErrorType
from cbatch_cli.job import run_job
from cbatch_cli.request import FinishReason, Request, RequestOutput
from tests.null_engine import MAX_NUM_SEQS, NullRunner, load_null_engine

NUM_ROWS = 60


def num_tokens(row: int) -> int:
    """How long an answer a row asks for."""
    return 12 if row % 10 == 3 else 6


class WatchedRun:
    """One run of a job: what it was given, what it made, and where it is stopped.

    This process gets `stop_signal` when as many ids were sampled as `stop_at_step` steps give that
    are full: steps alone would leave what is finished to how fast rows are read. `failing` rows
    come back with an error that another run may not meet.
    """

    def __init__(
        self,
        *,
        stop_at_step: int | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        failing: Collection[int] = (),
        model: str = "null",
    ) -> None:
        self.given: dict[int, Request] = {}
        self.finished: dict[int, RequestOutput] = {}
        self.cancelled: dict[int, RequestOutput] = {}
        self.num_sampled: Counter[int] = Counter()
        """Ids sampled for each row."""
        self.log: list[str] = []
        self.num_loads = 0
        self._stop_at_step = stop_at_step
        self._stop_signal = stop_signal
        self._failing = failing
        self._model = model

    def __call__(self, source: Path | str, output: Path | str, **options: Any) -> dict[str, Any]:
        """Run the job; returns its summary."""
        inputs = options.pop("inputs", (str(source),))
        config = build_job_config(
            {"inputs": inputs, "output": str(output), "max_tokens": 6, "rows_per_part": 8} | options
        )
        loader = EngineLoader(identify=lambda name: f"{name} {self._model}", load=self._load)
        return run_job(config, loader=loader, log=self.log.append)

    def _load(self, model: str, config: EngineConfig, log: Log = print_nothing) -> LoadedEngine:
        self.num_loads += 1
        engine = load_null_engine(model, config, log, runner=_Runner(self))
        generate = engine.client.generate

        def watched(requests: Iterable[Request]) -> Iterator[RequestOutput]:
            for output in generate(map(self._note, requests)):
                yield self._noted(output)

        engine.client.generate = watched  # type: ignore[method-assign]
        return engine

    def _note(self, request: Request) -> Request:
        assert request.key.row not in self.given
        self.given[request.key.row] = request
        return request

    def _noted(self, output: RequestOutput) -> RequestOutput:
        row = output.key.row
        if output.finish_reason is FinishReason.CANCELLED:
            self.cancelled[row] = output
            return output
        if row in self._failing:
            output = dataclasses.replace(
                output,
                finish_reason=FinishReason.ERROR,
                error=RowError(RowErrorType.ENGINE_ERROR, "out of luck"),
            )
        self.finished[row] = output
        return output

    def stop_if_due(self) -> None:
        """Send the signal, once."""
        if self._stop_at_step is None:
            return
        if self.num_sampled.total() >= MAX_NUM_SEQS * self._stop_at_step:
            self._stop_at_step = None
            signal.raise_signal(self._stop_signal)


class _Runner(NullRunner):
    def __init__(self, run: WatchedRun) -> None:
        self._run = run

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        self._run.stop_if_due()
        output = super().execute(step, stats)
        for key, token_ids in output.token_ids.items():
            self._run.num_sampled[key.row] += len(token_ids)
        return output


def rows_of(num_rows: int = NUM_ROWS, **columns: Any) -> list[dict[str, Any]]:
    """Input rows; each tenth asks for more tokens than the others."""
    return [
        {
            "id": row,
            "prompt": f"prompt {row}",
            "sampling_params": {"max_tokens": num_tokens(row)},
            **columns,
        }
        for row in range(num_rows)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows, compressed if its name says so."""
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_input(folder: Path, kind: str) -> dict[str, Any]:
    """Inputs of `NUM_ROWS` rows in one of the formats, as the option that names them."""
    rows = rows_of()
    match kind:
        case "two files":
            write_jsonl(folder / "a.jsonl", rows[:25])
            write_jsonl(folder / "b.jsonl", rows[25:])
            return {"inputs": (str(folder / "a.jsonl"), str(folder / "b.jsonl"))}
        case "jsonl" | "jsonl.gz":
            return {"inputs": (str(write_jsonl(folder / f"in.{kind}", rows)),)}
        case "csv":
            path = folder / "in.csv"
            path.write_text(
                "id,prompt\n" + "".join(f"{row['id']},{row['prompt']}\n" for row in rows)
            )
        case _:
            path = folder / "in.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    return {"inputs": (str(path),)}


def content(path: Path) -> list[dict[str, Any]]:
    """What an output holds, without what depends on the time."""
    rows: list[dict[str, Any]] = pq.read_table(path).drop_columns("metrics").to_pylist()
    return rows


def metrics(path: Path) -> list[dict[str, Any]]:
    """What each row says of its making."""
    values: list[dict[str, Any]] = pq.read_table(path)["metrics"].to_pylist()
    return values
