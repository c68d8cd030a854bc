"""Whether a job is new, half done or done, and what of it need not be run again."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.config import JobConfig
from cbatch_cli.data.fingerprint import inputs_identity, inputs_places, require_same
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.parquet_file import METADATA_KEY
from cbatch_cli.data.parquet_results import ParquetResults
from cbatch_cli.data.part_info import PartInfo, find_parts
from cbatch_cli.data.row import InputPosition, RowResult
from cbatch_cli.data.sources import Source
from cbatch_cli.data.work_dir import WorkDir

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
    fingerprint: Mapping[str, Any]
    places: list[dict[str, Any]]
    summary: dict[str, Any] | None = None
    """Of a job that is done: nothing is to be run."""
    settled: Mapping[str, Any] | None = None
    """What the first run settled only once the model was loaded; None for a new job."""
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
            if row_index in results.rows:
                return results.result(row_index)
        return None

    def run_file(self, settled: Mapping[str, Any], summary: Mapping[str, Any] | None) -> Any:
        """What the work directory keeps of the run."""
        return {
            "run_id": self.run_id,
            "fingerprint": self.fingerprint,
            "places": self.places,
            "settled": settled,
            "retry_errors": self.retry_errors and summary is None,
            "summary": summary,
        }


def job_fingerprint(
    config: JobConfig, source: Source, *, template: str | None, model_commit: str
) -> dict[str, Any]:
    """What the job's answers depend on, as far as it is known before the model is loaded.

    Names, places and times of files are no part of it, nor is how the engine batches.
    """
    return {
        "inputs": inputs_identity(source.files),
        "model": model_commit,
        "template": template,
        "dtype": config.engine.dtype,
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
    fingerprint: Mapping[str, Any],
) -> RunPlan:
    """Decide, under the work dir's lock, and clear away what must not be taken up.

    Raises `ResumeMismatchError` when the work dir belongs to a different job, `UsageError` when
    the target is in the way.
    """
    plan = RunPlan(
        run_id=uuid.uuid4().hex, fingerprint=fingerprint, places=inputs_places(source.files)
    )
    earlier = None if config.overwrite else work_dir.read_run()
    is_done = earlier is not None and _is_done(earlier, target)
    if earlier is not None and earlier["summary"] and not is_done:
        earlier = None  # the answers were taken away
    if earlier is None or (config.no_resume and not is_done):
        target.prepare(overwrite=config.overwrite or earlier is not None)
        work_dir.start_over()
        return plan
    if config.no_resume:
        target.prepare(overwrite=False)
    require_same(fingerprint, earlier["fingerprint"], output=str(target.path))
    summary = _done_summary(earlier, target)
    plan.retry_errors = config.retry_errors or earlier["retry_errors"]
    if summary is not None and not (plan.retry_errors and summary["rows_failed"]):
        plan.summary = summary
        return plan
    plan.run_id = earlier["run_id"] if summary is None else plan.run_id
    plan.settled = earlier["settled"]
    _take_up(plan, config, target, source, is_same_place=plan.places == earlier["places"])
    return plan


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
    number = 0
    while (part := plan.parts.get(number)) and (part.end is not None or source.is_indexed):
        plan.num_skipped, plan.start = part.rows.stop, part.end
        number += 1


def _open_results(target: OutputTarget, number: int, config: JobConfig) -> ParquetResults:
    path = target.part_path(number)
    return ParquetResults(path, with_token_ids=config.return_token_ids)


def _is_done(run: Mapping[str, Any], target: OutputTarget) -> bool:
    return _done_summary(run, target) is not None


def _done_summary(run: Mapping[str, Any], target: OutputTarget) -> dict[str, Any] | None:
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


def settled_by_model(sampling: Any, dtype: str | None) -> dict[str, Any]:
    """What the answers depend on that only a loaded model tells."""
    fields = {name: _plain(value) for name, value in dataclasses.asdict(sampling).items()}
    return {"resolved sampling": fields, "resolved dtype": dtype}


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
