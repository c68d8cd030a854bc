"""One batch job: source -> prompts -> engine -> text -> sink. The only file that knows every part.

Three threads. The engine's feeder reads and tokenises, pulled by the engine's window; the caller's
thread runs the engine; a writer makes text and Parquet of what is finished. Bounded queues between
them keep memory flat however long the input is.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

import pyarrow as pa

from cbatch_cli import __version__
from cbatch_cli.assembly import (
    DEFAULT_LOADER,
    EngineLoader,
    LoadedEngine,
    Log,
    print_nothing,
    resolve_sampling,
)
from cbatch_cli.config import JobConfig, resolved_dict
from cbatch_cli.data.columns import ColumnEncoder
from cbatch_cli.data.errors_file import check_errors_file, write_failed_rows
from cbatch_cli.data.fingerprint import inputs_digest
from cbatch_cli.data.job_input import open_job_input
from cbatch_cli.data.journal import Journal
from cbatch_cli.data.output_schema import output_schema
from cbatch_cli.data.output_target import OutputTarget, resolve_target
from cbatch_cli.data.parquet_sink import ParquetSink
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import Row
from cbatch_cli.data.sources import Source
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import RowError, RunInterruptedError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.guards import ErrorGuard
from cbatch_cli.interrupts import Interrupts
from cbatch_cli.job_progress import JobProgress, OnProgress, Ticking
from cbatch_cli.job_rows import JobRows
from cbatch_cli.job_writer import Answer, JobWriter, RowCounts
from cbatch_cli.request import FinishReason, Request, SamplingParams
from cbatch_cli.resume import RunPlan, job_fingerprint, plan_run, settled_by_model, tidy_spools
from cbatch_cli.shard import resolve_shard
from cbatch_cli.text.prompts import PromptEncoder
from cbatch_cli.text.templates import load_template

_LARGEST_BATCH = 256
"""Rows tokenised in one call; the first batches are smaller so that the engine starts at once."""


def run_job(
    config: JobConfig,
    *,
    on_progress: OnProgress | None = None,
    log: Log = print_nothing,
    loader: EngineLoader = DEFAULT_LOADER,
) -> dict[str, Any]:
    """Run one job to its end and return its summary. Rows that fail do not raise.

    What an interrupted run of the same job has left is taken up; for a job that is done nothing
    is run, and its summary has `already_done` too. `on_progress` is called twice a second on a
    thread of its own, `log` with single lines for people. On the main thread SIGINT and SIGTERM
    stop the run. Raises `CBatchError`.
    """
    shard = resolve_shard(config.shard, os.environ)
    target = resolve_target(config.output, config.inputs, shard)
    errors_file = None
    if config.errors_file is not None:
        errors_file = check_errors_file(
            config.errors_file, target=target, inputs=config.inputs, shard=shard
        )
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        work_dir = stack.enter_context(WorkDir(target.work_dir))
        stack.callback(tidy_spools, work_dir)
        source, prompt = open_job_input(config, spool_dir=work_dir.path)
        template = None if config.template is None else load_template(config.template)
        if not work_dir.has_run:
            loader.check(config.engine)
        plan = plan_run(
            config,
            work_dir=work_dir,
            target=target,
            source=source,
            shard=shard,
            fingerprint=job_fingerprint(
                config,
                source,
                shard=shard,
                template=template,
                model_commit=loader.identify(config.model),
            ),
        )
        if plan.summary is not None:
            log(f"{target.path} is done already; there is nothing to run")
            if errors_file is not None:
                log(write_failed_rows(errors_file, config, target, source, prompt).text)
            plan.end(work_dir, plan.settled or {}, plan.summary)
            return {**plan.summary, "already_done": True}
        passthrough = source.arrow_schema(prompt)
        schema = output_schema(
            passthrough,
            output_column=config.output_column,
            return_token_ids=config.return_token_ids,
        )
        log(f"loading {config.model}")
        engine = loader.load(config.model, config.engine, log)
        params = resolve_sampling(
            config.sampling_options,
            engine.generation_defaults,
            vocab_size=engine.description.get("vocab_size"),
        )
        log(f"sampling: {_describe(params)}")
        settled = settled_by_model(params, engine.description)
        encoder = PromptEncoder(
            tokenizer=engine.tokenizer,
            prompt=prompt,
            template=template,
            system=config.system,
            chat=config.chat,
            defaults=params,
            max_model_len=engine.description["max_model_len"],
            kv_capacity_tokens=engine.client.max_sequence_tokens,
        )
        stack.callback(encoder.close)
        # Whatever could be wrong with the command has been told by now.
        plan.begin(work_dir, target, source, settled)
        job = _BatchJob(
            config=config,
            target=target,
            plan=plan,
            source=source,
            prompt=prompt,
            columns=ColumnEncoder(passthrough),
            schema=schema,
            encoder=encoder,
            engine=engine,
            params=params,
            log=log,
        )
        summary = job.run(on_progress, interrupts)
        if errors_file is not None:
            log(write_failed_rows(errors_file, config, target, source, prompt).text)
        plan.end(work_dir, settled, summary)
        return summary


class _BatchJob:
    """The running job: what its threads share."""

    def __init__(
        self,
        *,
        config: JobConfig,
        target: OutputTarget,
        plan: RunPlan,
        source: Source,
        prompt: PromptColumns,
        columns: ColumnEncoder,
        schema: pa.Schema,
        encoder: PromptEncoder,
        engine: LoadedEngine,
        params: SamplingParams,
        log: Log,
    ) -> None:
        self._config = config
        self._target = target
        self._plan = plan
        self._source = source
        self._encoder = encoder
        self._engine = engine
        self._params = params
        self._log = log
        self._generation = TextGeneration(engine.client, engine.tokenizer)
        self._in_engine: dict[int, Row] = {}
        self._counts = RowCounts(errors=plan.errors, num_resumed=plan.num_rows)
        self._counts.num_ok = plan.num_rows - self._counts.num_failed
        self._journal = Journal.open(target.work_dir)
        for part in plan.parts.values():
            self._journal.drop(part.rows)
        self._rows = JobRows(
            source=source,
            prompt=prompt,
            plan=plan,
            journal=self._journal.recovered,
            rows_per_part=config.rows_per_part,
            output=str(target.path),
        )
        self._sink = ParquetSink(
            target=target,
            schema=schema,
            encoder=columns,
            rows_per_part=config.rows_per_part,
            shard=plan.shard,
            metadata=self.metadata,
            durable=plan.parts,
            on_part_durable=self._journal.drop,
        )
        self._guard = ErrorGuard(config, shard=plan.shard, parts=plan.parts.values())
        self._writer = JobWriter(
            finalize=self._generation.finalize,
            journal=self._journal,
            write=self._sink.add,
            guard=self._guard,
            counts=self._counts,
            return_token_ids=config.return_token_ids,
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known of the run before its first row."""
        return {
            "cbatch_version": __version__,
            "run_id": self._plan.run_id,
            "config": resolved_dict(self._config),
            "identity": {
                "model": self._plan.fingerprint["model"],
                "inputs": inputs_digest(self._plan.fingerprint["inputs"]),
            },
            "resolved": {
                "sampling": dataclasses.asdict(self._params),
                "engine": dict(self._engine.description),
            },
        }

    def run(self, on_progress: OnProgress | None, interrupts: Interrupts) -> dict[str, Any]:
        """Run every row and write the output; returns the summary."""
        started_at = time.monotonic()
        progress = JobProgress(
            source=self._source,
            rows=self._rows,
            counts=self._counts,
            stats=self._engine.client.stats,
            started_at=started_at,
        )
        interrupts.on_first = self._engine.client.stop
        try:
            with Ticking(on_progress, progress.snapshot):
                self._answer_all(interrupts)
            if interrupts.received is not None:
                raise self._interrupted(interrupts.received)
            self._guard.at_end(self._counts)
            interrupts.on_first = _finish_first
            summary = self._summary(time.monotonic() - started_at)
            self._sink.finish({**self.metadata, "totals": summary})
        except BaseException:
            self._sink.abort()
            self._journal.close()
            raise
        self._journal.close()
        return summary

    def _answer_all(self, interrupts: Interrupts) -> None:
        """Run the engine over the rows until they are answered, a signal or a failure."""
        try:
            with closing(self._generation.generate(self._requests(interrupts))) as answers:
                for request, output in answers:
                    row = self._in_engine.pop(request.key.row)
                    if output.finish_reason is not FinishReason.CANCELLED:
                        self._writer.put(row, Answer(request, output))
                    elif output.token_ids:
                        self._journal.append_partial(
                            row.index, row.content_hash, output.token_ids, request.attempt
                        )
                    if self._writer.error is not None:
                        break
        finally:
            # Also what finished before a failure is kept.
            self._writer.close()

    def _requests(self, interrupts: Interrupts) -> Iterator[Request]:
        """Requests for the engine; rows that end before it go straight to the writer."""
        if interrupts.received is not None:
            self._engine.client.stop()  # the signal came before there was something to stop
        to_run = self._rows.to_run(settle=self._writer.put)
        size = 1
        while (batch := list(islice(to_run, size))) and self._writer.error is None:
            size = min(2 * size, _LARGEST_BATCH)
            prompts = self._encoder.encode([entry.row for entry in batch])
            for entry, prompt in zip(batch, prompts, strict=True):
                if isinstance(prompt, RowError):
                    self._writer.put(entry.row, prompt)
                    continue
                self._in_engine[entry.row.index] = entry.row
                yield entry.request(prompt.token_ids, prompt.params)

    def _interrupted(self, received: int) -> RunInterruptedError:
        self._journal.sync()
        command = shlex.join(["cbatch", *sys.argv[1:]])
        self._log(f"{self._counts.num_done:,} rows are safe; resume with: {command}")
        return RunInterruptedError("interrupted", signal_number=received)

    def _summary(self, wall_s: float) -> dict[str, Any]:
        counts = self._counts
        engine_summary = self._engine.client.stats.summary()
        return {
            "rows": counts.num_done,
            "rows_ok": counts.num_ok,
            "rows_failed": counts.num_failed,
            "rows_resumed": counts.num_resumed,
            "errors": dict(counts.errors),
            "wall_s": round(wall_s, 4),
            "load_s": round(self._engine.load_s, 4),
            **engine_summary,
            "output": str(self._target.path),
            "resolved": self.metadata["resolved"],
            **self._shard_summary(),
        }

    def _shard_summary(self) -> dict[str, Any]:
        """What says, of a share of the input, that the other shares go with it."""
        if self._config.shard is None:
            return {}
        shard = self._plan.shard
        return {
            "shard": {
                "index": shard.index,
                "count": shard.count,
                "rows_of_input": self._rows.num_read,
            }
        }


def _finish_first() -> None:
    """A first signal while the output is being finished: it is about to end anyway."""


def _describe(params: SamplingParams) -> str:
    """The run's sampling on one line, without what is switched off."""
    values = dataclasses.asdict(params)
    shown = {name: value for name, value in values.items() if value or name == "temperature"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
