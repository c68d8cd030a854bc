"""Whether a job is new, half done or done, and what of it need not be run again."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.config import JobConfig
from cbatch_cli.data.fingerprint import (
    as_begun,
    inputs_identity,
    inputs_places,
    require_same,
    require_same_settled,
)
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.parquet_file import METADATA_KEY
from cbatch_cli.data.parquet_results import ParquetResults
from cbatch_cli.data.part_info import PartInfo, find_parts
from cbatch_cli.data.row import InputPosition, RowResult
from cbatch_cli.data.sources import Source
from cbatch_cli.data.spool import discard_later_spools, discard_spools
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import OutputError, ResumeMismatchError
from cbatch_cli.shard import WHOLE, Shard

# Fields of the configuration that change what a row of the output holds.
_CONTENT_FIELDS = (
    "input_format",
    "prompt_column",
    "messages_column",
    "system",
    "chat",
    "columns",
    "limit",
    "max_line_bytes",
    "output_column",
    "rows_per_part",
    "return_token_ids",
)


@dataclass(kw_only=True, slots=True)
class RunPlan:
    """What earlier runs of the job have left, and how this one takes it up."""

    run_id: str
    shard: Shard = WHOLE
    """The rows of the input that are the job's."""
    num_input_rows: int | None = None
    """Rows of the whole input, where that is known before they are read."""
    fingerprint: Mapping[str, Any]
    places: list[dict[str, Any]]
    """Where the inputs were when every row that is done was read from them."""
    is_new: bool = True
    """Whether nothing is taken up: what is in the way is cleared when the run begins."""
    overwrite: bool = False
    """Whether the run began by replacing what was there, so that its command says so again."""
    summary: dict[str, Any] | None = None
    """Of a job that is done: nothing is to be run."""
    settled: Mapping[str, Any] | None = None
    """What the first run settled only once the model was loaded; None for a new job."""
    undecided: list[str] = field(default_factory=list)
    """Settings that the model tells whether they are those of the first run."""
    retry_errors: bool = False
    parts: dict[int, PartInfo] = field(default_factory=dict)
    """Parts whose rows are left alone, by number."""
    reopened: list[ParquetResults] = field(default_factory=list)
    """Files with rows to be tried again; the other rows keep their results."""
    num_skipped: int = 0
    start: InputPosition | None = None
    """Rows that need not even be read, and where the input goes on behind them."""

    @property
    def errors(self) -> Counter[str]:
        """Failed rows of the parts that are left alone, by error type."""
        return sum((Counter(part.errors) for part in self.parts.values()), Counter())

    @property
    def num_rows(self) -> int:
        """Rows of the parts that are left alone."""
        return sum(len(part.rows) for part in self.parts.values())

    def reopened_result(self, row_index: int) -> RowResult | None:
        """The result of a row in a file that is written again."""
        for results in self.reopened:
            if row_index in results:
                return results.result(row_index)
        return None

    def begin(
        self, work_dir: WorkDir, target: OutputTarget, source: Source, settled: Mapping[str, Any]
    ) -> None:
        """Clear away what is not taken up and put down what the run is; the first row may follow.

        Raises `ResumeMismatchError` if the model has settled something else than before.
        """
        if self.settled is not None:
            require_same_settled(settled, self.settled, self.undecided, output=str(target.path))
        if self.is_new:
            work_dir.start_over()
            target.clear()
            discard_spools(work_dir.path, keep={Path(file.location) for file in source.files})
        else:
            work_dir.discard_unfinished()
        work_dir.write_run(self.run_file(settled, summary=None))

    def end(
        self, work_dir: WorkDir, settled: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> None:
        """Put down that the run is done, and remove what only an unfinished one needs."""
        work_dir.write_run(self.run_file(settled, summary))
        work_dir.discard_work()
        discard_spools(work_dir.path)
        for results in self.reopened:
            results.close()

    def run_file(self, settled: Mapping[str, Any], summary: Mapping[str, Any] | None) -> Any:
        """What the work directory keeps of the run."""
        return {
            "run_id": self.run_id,
            "fingerprint": self.fingerprint,
            "places": self.places,
            "num_input_rows": self.num_input_rows,
            "overwrite": self.overwrite,
            "settled": settled,
            "retry_errors": self.retry_errors and summary is None,
            "summary": summary,
        }


def job_fingerprint(
    config: JobConfig,
    source: Source,
    *,
    shard: Shard | None = None,
    template: str | None,
    model_commit: str,
) -> dict[str, Any]:
    """What the job's answers depend on, as far as it is known before the model is loaded.

    Names, places and times of files are no part of it, nor is how the engine batches.
    """
    return {
        "inputs": inputs_identity(source.files),
        "shard": shard and str(shard),
        "model": model_commit,
        "template": template,
        "dtype": config.engine.dtype,
        "quantization": config.engine.quantization,
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "deterministic": config.engine.deterministic,
        "seed": config.engine.seed,
        "max_model_len": config.engine.max_model_len,
        "sampling": {k: _plain(v) for k, v in config.sampling_options.items()},
        **{name: getattr(config, name) for name in _CONTENT_FIELDS},
    }


def plan_run(
    config: JobConfig,
    *,
    work_dir: WorkDir,
    target: OutputTarget,
    source: Source,
    shard: Shard | None = None,
    fingerprint: Mapping[str, Any],
) -> RunPlan:
    """Decide, under the work dir's lock, what is to be done; nothing is changed yet.

    Raises `ResumeMismatchError` when the work dir belongs to a different job, `UsageError` when
    the target is in the way.
    """
    plan = RunPlan(
        run_id=uuid.uuid4().hex,
        shard=shard or WHOLE,
        num_input_rows=source.num_rows,
        fingerprint=fingerprint,
        places=inputs_places(source.files),
        overwrite=config.overwrite,
    )
    earlier = _earlier_run(config, work_dir, target, fingerprint)
    summary = None if earlier is None else done_summary(earlier, target)
    if earlier is not None and earlier["summary"] and summary is None:
        earlier = None  # the answers were taken away
    if earlier is None or config.no_resume:
        is_in_our_way = earlier is not None and summary is None
        target.prepare(overwrite=config.overwrite or is_in_our_way)
        return plan
    plan.fingerprint, plan.undecided = as_begun(
        fingerprint, earlier["fingerprint"], earlier["settled"], is_done=summary is not None
    )
    require_same(plan.fingerprint, earlier["fingerprint"], output=str(target.path))
    plan.is_new = False
    plan.settled = earlier["settled"]
    plan.overwrite = earlier["overwrite"]
    plan.retry_errors = config.retry_errors or earlier["retry_errors"]
    is_same_place = plan.places == earlier["places"]
    # Kept even if they are others now: what has moved is not yet known to be what it was.
    plan.places = earlier["places"]
    if summary is not None and not (plan.retry_errors and summary["rows_failed"]):
        plan.run_id = earlier["run_id"]
        plan.summary = summary
        return plan
    plan.run_id = earlier["run_id"] if summary is None else plan.run_id
    _take_up(plan, config, target, source, is_same_place=is_same_place)
    return plan


def tidy_spools(work_dir: WorkDir) -> None:
    """Remove the copies of inputs that no run will read: that of one which was refused."""
    if work_dir.has_run:
        discard_later_spools(work_dir.path)
    else:
        discard_spools(work_dir.path)


def _earlier_run(
    config: JobConfig, work_dir: WorkDir, target: OutputTarget, fingerprint: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The run that the work directory tells of, unless it is to be replaced unseen."""
    if not config.overwrite:
        return work_dir.read_run()
    # A run that began with this command goes on with it. Any other, and one that is done, was
    # told to give way.
    try:
        earlier = work_dir.read_run()
    except (OutputError, ResumeMismatchError):
        return None
    if earlier is None or not earlier["overwrite"] or earlier["fingerprint"] != fingerprint:
        return None
    return earlier if done_summary(earlier, target) is None else None


def _take_up(
    plan: RunPlan, config: JobConfig, target: OutputTarget, source: Source, *, is_same_place: bool
) -> None:
    plan.parts = find_parts(target)
    if plan.retry_errors:
        for number in [n for n, part in plan.parts.items() if part.errors]:
            del plan.parts[number]
            plan.reopened.append(_open_results(target, number, config))
        if not target.is_directory and target.path.exists():
            plan.reopened.append(
                ParquetResults(target.path, with_token_ids=config.return_token_ids)
            )
    if not is_same_place:
        return
    for number in itertools.count(plan.shard.index, plan.shard.count):
        part = plan.parts.get(number)
        if part is None or (part.end is None and not source.is_indexed):
            break
        plan.num_skipped, plan.start = part.rows.stop, part.end


def _open_results(target: OutputTarget, number: int, config: JobConfig) -> ParquetResults:
    path = target.part_path(number)
    return ParquetResults(path, with_token_ids=config.return_token_ids)


def done_summary(run: Mapping[str, Any], target: OutputTarget) -> dict[str, Any] | None:
    """The summary of a run whose answers are in place; None for one that is not done."""
    if run["summary"] is not None:
        return run["summary"] if target.path.exists() else None
    if target.is_directory or not target.path.exists():
        return None
    # It may have died between the file's appearance and the note of it.
    try:
        notes = pq.read_metadata(target.path).metadata or {}
        metadata = orjson.loads(notes[METADATA_KEY.encode()])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return metadata["totals"] if metadata.get("run_id") == run["run_id"] else None


def settled_by_model(sampling: Any, engine: Mapping[str, Any]) -> dict[str, Any]:
    """What the answers depend on that only a loaded model tells; `engine` describes its engine."""
    fields = {name: _plain(value) for name, value in dataclasses.asdict(sampling).items()}
    return {
        "resolved sampling": fields,
        "resolved dtype": engine.get("dtype"),
        "resolved kv_cache_dtype": engine.get("kv_cache_dtype"),
        "resolved deterministic": engine.get("batch_invariant"),
        "resolved max_model_len": engine.get("max_model_len"),
    }


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
