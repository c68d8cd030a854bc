"""What the commands do once their options are read. Heavy modules load here, not before."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cbatch_cli.bench.config import BenchConfig
from cbatch_cli.bench.suite import SuiteName
from cbatch_cli.cli_outcome import EXIT_ROW_ERRORS, EXIT_ROWS_DIFFER, json_text, print_data
from cbatch_cli.config import EngineConfig, JobConfig
from cbatch_cli.errors import CBatchError, OutputError, UsageError


def run_bench(
    config: BenchConfig,
    *,
    suite: SuiteName | None,
    json_result: bool,
    json_file: Path | None,
    quiet: bool,
) -> int:
    """Measure a workload or a suite, and print the table or the JSON of what was measured."""
    from cbatch_cli.bench.runner import run_bench as measure
    from cbatch_cli.bench.suite import SuiteSettings, run_suite, suite_table
    from cbatch_cli.bench.table import bench_table

    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json-file {json_file}: there is no folder {json_file.parent}")

    def log(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    def keep(result: Mapping[str, Any]) -> None:
        if json_file is None:
            return
        try:
            json_file.write_text(json_text(result), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {json_file}: {error.strerror}") from error

    if suite is None:
        result = measure(config, log=log)
        keep(result)
    else:
        settings = SuiteSettings(
            engine=config.job.engine,
            model=config.job.model,
            repeat=config.repeat,
            rows=config,
        )
        result = run_suite(suite, settings, log, keep=keep)
    if json_result:
        print_data(json_text(result))
    else:
        print_data(bench_table(result) if suite is None else suite_table(result))
    return 0


def run_job(config: JobConfig, *, json_summary: bool, quiet: bool) -> int:
    """Run a job with progress and its summary; returns the exit status."""
    from cbatch_cli.job import run_job as run
    from cbatch_cli.progress import open_progress

    progress = open_progress("none" if quiet else config.progress)

    def log(line: str) -> None:
        if not quiet:
            progress.write(line)

    try:
        summary = run(config, on_progress=progress.update, log=log)
    finally:
        progress.close()
    if json_summary:
        print_data(json_text(summary))
    elif not quiet:
        progress.show_summary(summary)
    return EXIT_ROW_ERRORS if summary["rows_failed"] and not config.allow_errors else 0


def run_verify(
    output: str,
    *,
    num_rows: int,
    seed: int,
    inputs: Sequence[str],
    changes: Mapping[str, Any],
    as_json: bool,
    quiet: bool,
) -> int:
    """Run rows of an output again and print which differ; returns the exit status."""
    from cbatch_cli.verify import verify_output
    from cbatch_cli.verify_result import verify_text

    if num_rows < 1:
        raise UsageError(f"--rows must be at least 1, not {num_rows}")

    def log(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    result = verify_output(
        output, num_rows=num_rows, seed=seed, inputs=inputs, changes=changes, log=log
    )
    if as_json:
        print_data(json_text(result))
    elif not quiet:
        print_data(verify_text(result))
    return EXIT_ROWS_DIFFER if result["rows_different"] else 0


def dry_run(config: JobConfig, *, json_summary: bool) -> int:
    """Print what the job would do."""
    from cbatch_cli.dry_run import describe_job, dry_run_text

    description = describe_job(config)
    print_data(json_text(description) if json_summary else dry_run_text(description))
    return 0


def run_doctor(
    model: str | None, config: EngineConfig, *, with_operations: bool, as_json: bool
) -> int:
    """Print the facts of the machine, and of a model if one is named.

    The machine's are printed even though the model is refused, which is raised then.
    """
    from cbatch_cli.doctor import doctor_text, environment_facts, model_facts

    report: dict[str, Any] = {"environment": environment_facts()}
    try:
        if model is not None:
            report["model"] = model_facts(model, config, with_operations=with_operations)
    except CBatchError as error:
        report["model"] = {"name": model, "error": str(error)}
        raise
    finally:
        print_data(json_text(report) if as_json else doctor_text(report))
    return 0
