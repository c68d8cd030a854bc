"""Joining the outputs of a job's shards into the one that the whole job would have written."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cbatch_cli import __version__
from cbatch_cli.data import durable_io
from cbatch_cli.data.fingerprint import differences
from cbatch_cli.data.merged_output import ShardRows, write_merged
from cbatch_cli.data.output_target import OutputTarget, named_target
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.data.shard_targets import find_shards
from cbatch_cli.data.work_dir import WorkDir, read_run
from cbatch_cli.errors import ResumeMismatchError, UsageError
from cbatch_cli.merged_summary import merged_summary
from cbatch_cli.resume import done_summary
from cbatch_cli.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class _DoneShard:
    """A shard that is done."""

    shard: Shard
    target: OutputTarget
    run: Mapping[str, Any]
    summary: Mapping[str, Any]


def merge_shards(output: str, *, overwrite: bool, remove_shards: bool) -> dict[str, Any]:
    """Check the shards beside `output`, join them, and return the summary of the whole.

    What a merge that died has left is replaced, and for one that is done nothing is written.
    Raises `UsageError` for a shard that is missing or not done and for rows that are missing or
    there twice, `ResumeMismatchError` for shards of different jobs, `OutputLockedError` while a
    shard is running, `OutputError`.
    """
    target = named_target(output)
    found = find_shards(target)
    if not found and not target.work_dir.is_dir():
        raise UsageError(f"there are no shards beside {target.path}")
    with ExitStack() as stack:
        work_dir = stack.enter_context(WorkDir(target.work_dir))
        earlier = work_dir.read_run()
        summary = _merged_already(earlier, target, found)
        if summary is None:
            _check_all_are_there(found, target)
        if summary is None or remove_shards:
            locked = {shard: _lock(shard, found[shard], stack) for shard in found}
        if summary is None:
            done = [_check_done(shard, found[shard], locked[shard]) for shard in found]
            _check_same_job(done)
            summary = _merge(done, work_dir, target, earlier, overwrite=overwrite)
        if remove_shards:
            for shard, shard_target in found.items():
                _remove(shard_target, locked[shard])
    return summary


def _merged_already(
    run: Mapping[str, Any] | None, target: OutputTarget, found: Mapping[Shard, OutputTarget]
) -> dict[str, Any] | None:
    """The summary of a merge of these very shards, of which some may be removed since."""
    if run is None or "merged_from" not in run or run["summary"] is None:
        return None
    if not target.path.exists():
        return None
    for shard, shard_target in found.items():
        shard_run = read_run(shard_target.work_dir)
        is_known = shard_run is None or run["merged_from"].get(str(shard)) == shard_run["run_id"]
        if not is_known or str(shard) not in run["merged_from"]:
            return None
    return dict(run["summary"])


def _check_all_are_there(found: Mapping[Shard, OutputTarget], target: OutputTarget) -> None:
    if not found:
        raise UsageError(f"there are no shards beside {target.path}")
    counts = sorted({shard.count for shard in found})
    if len(counts) > 1:
        raise UsageError(
            f"beside {target.path} are shards of {' and of '.join(map(str, counts))}; move away "
            "those that are not wanted"
        )
    missing = [index for index in range(counts[0]) if Shard(index, counts[0]) not in found]
    if missing:
        shown = ", ".join(f"{index}/{counts[0]}" for index in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise UsageError(f"beside {target.path} there is no shard {shown}{more}")


def _lock(shard: Shard, target: OutputTarget, stack: ExitStack) -> WorkDir:
    """The shard's work directory, so that no run changes the shard meanwhile."""
    if not target.work_dir.is_dir():
        raise UsageError(f"{target.work_dir}, which says what shard {shard} is, is not there")
    return stack.enter_context(WorkDir(target.work_dir))


def _check_done(shard: Shard, target: OutputTarget, work_dir: WorkDir) -> _DoneShard:
    run = work_dir.read_run()
    summary = None if run is None else done_summary(run, target)
    if run is None or summary is None:
        raise UsageError(f"shard {shard} is not done; run its command again to finish it")
    return _DoneShard(shard=shard, target=target, run=run, summary=summary)


def _check_same_job(done: Sequence[_DoneShard]) -> None:
    first = done[0]
    for other in done:
        if other.run["fingerprint"].get("shard") != str(other.shard):
            raise ResumeMismatchError(
                f"{other.target.path} is not the shard that its name says: it is "
                f"{other.run['fingerprint'].get('shard')}"
            )
        differing = differences(first.run, other.run)
        if differing:
            raise ResumeMismatchError(
                f"{first.target.path} and {other.target.path} are of different jobs: "
                f"{', '.join(differing)} differ"
            )
        if _rows_of_input(first) != _rows_of_input(other):
            raise UsageError(
                f"{first.target.path} was made of {_rows_of_input(first)} rows of input, "
                f"{other.target.path} of {_rows_of_input(other)}"
            )


def _merge(
    done: Sequence[_DoneShard],
    work_dir: WorkDir,
    target: OutputTarget,
    earlier: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    first = done[0]
    is_ours = earlier is not None and "merged_from" in earlier and earlier["summary"] is None
    if earlier is not None and earlier["summary"] is None and not (is_ours or overwrite):
        raise UsageError(
            f"{target.path} was begun by a run of its own; finish that, or replace it with "
            "--overwrite"
        )
    files = [path for shard in done for path in shard.target.files()]
    rows = ShardRows(
        files,
        index_position=-6 if first.run["fingerprint"]["return_token_ids"] else -5,
        num_rows=_rows_of_input(first),
    )
    target.prepare(overwrite=overwrite or is_ours)
    work_dir.start_over()
    run = _run_file(done)
    work_dir.write_run(run)
    summary = merged_summary([shard.summary for shard in done], output=str(target.path))
    metadata = read_note(first.target.files()[-1], METADATA_KEY)
    write_merged(
        target,
        rows,
        parts=rows.paths() or files[:1],
        metadata={
            "cbatch_version": __version__,
            "run_id": run["run_id"],
            "config": {**metadata["config"], "shard": None, "output": str(target.path)},
            "identity": metadata.get("identity", {}),
            "resolved": metadata["resolved"],
        },
        totals={"totals": summary, "shards": [shard.summary for shard in done]},
    )
    work_dir.write_run({**run, "summary": summary})
    return summary


def _run_file(done: Sequence[_DoneShard]) -> dict[str, Any]:
    """As the run of the whole job would leave it, so that its command finds it done."""
    first = done[0].run
    return {
        "run_id": uuid.uuid4().hex,
        "merged_from": {str(shard.shard): shard.run["run_id"] for shard in done},
        "fingerprint": {**first["fingerprint"], "shard": None},
        "places": first["places"],
        "num_input_rows": first["num_input_rows"],
        "overwrite": False,
        "settled": first["settled"],
        "retry_errors": False,
        "summary": None,
    }


def _rows_of_input(done: _DoneShard) -> int:
    num_rows: int = done.summary["shard"]["rows_of_input"]
    return num_rows


def _remove(target: OutputTarget, work_dir: WorkDir) -> None:
    """Remove a shard, its answers first: what is left after a death is known by its run file."""
    for path in target.files() if target.path.exists() else ():
        durable_io.unlink(path)
    if target.path.is_dir():
        durable_io.remove_empty_dir(target.path)
    work_dir.start_over()
