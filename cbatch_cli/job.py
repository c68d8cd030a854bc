"""One batch job: source -> prompts -> engine -> text -> sink. The only file that knows every part.

Three threads. The engine's feeder reads and tokenises, pulled by the engine's window; the caller's
thread runs the engine; a writer makes text and Parquet of what is finished. Bounded queues between
them keep memory flat however long the input is.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

from cbatch_cli import __version__
from cbatch_cli.assembly import LoadedEngine, Log, load_engine, print_nothing, resolve_sampling
from cbatch_cli.config import EngineConfig, JobConfig, resolved_dict
from cbatch_cli.data.columns import ColumnEncoder
from cbatch_cli.data.output_schema import output_schema
from cbatch_cli.data.output_target import OutputTarget, resolve_target
from cbatch_cli.data.parquet_sink import ParquetSink
from cbatch_cli.data.prompt_columns import PromptColumns, choose_prompt_columns
from cbatch_cli.data.row import Row
from cbatch_cli.data.sources import Source, open_source
from cbatch_cli.data.work_dir import WorkDir
from cbatch_cli.errors import RowError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.job_writer import Answer, JobWriter
from cbatch_cli.metrics import RunSnapshot
from cbatch_cli.request import Request, RequestKey, SamplingParams
from cbatch_cli.text.prompts import PromptEncoder
from cbatch_cli.text.templates import read_template

OnProgress = Callable[[RunSnapshot], None]
LoadEngine = Callable[[str, EngineConfig, Log], LoadedEngine]

_PROGRESS_INTERVAL_S = 0.5
_LARGEST_BATCH = 256
"""Rows tokenised in one call; the first batches are smaller so that the engine starts at once."""


def run_job(
    config: JobConfig,
    *,
    on_progress: OnProgress | None = None,
    log: Log = print_nothing,
    load: LoadEngine = load_engine,
) -> dict[str, Any]:
    """Run one job to its end and return its summary. Rows that fail do not raise.

    `on_progress` is called twice a second on a thread of its own, `log` with single lines for
    people, `load` builds the engine. Raises `CBatchError`.
    """
    target = resolve_target(config.output, config.inputs)
    with ExitStack() as stack:
        work_dir = stack.enter_context(WorkDir(target.work_dir))
        target.prepare(overwrite=config.overwrite)
        work_dir.start_over()
        source = open_source(
            config.inputs,
            input_format=config.input_format,
            columns=config.columns,
            limit=config.limit,
            max_line_bytes=config.max_line_bytes,
            spool_dir=work_dir.path,
        )
        prompt = choose_prompt_columns(
            source.column_names,
            prompt_column=config.prompt_column,
            messages_column=config.messages_column,
            has_template=config.template is not None,
            is_openai=source.is_openai,
        )
        template = None if config.template is None else read_template(config.template)
        engine = load(config.model, config.engine, log)
        params = resolve_sampling(config.sampling_options, engine.generation_defaults)
        log(f"sampling: {_describe(params)}")
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
        job = _BatchJob(
            config=config,
            target=target,
            source=source,
            prompt=prompt,
            encoder=encoder,
            engine=engine,
            params=params,
        )
        work_dir.write_run(job.metadata)
        return job.run(on_progress)


class _BatchJob:
    """The running job: what its threads share."""

    def __init__(
        self,
        *,
        config: JobConfig,
        target: OutputTarget,
        source: Source,
        prompt: PromptColumns,
        encoder: PromptEncoder,
        engine: LoadedEngine,
        params: SamplingParams,
    ) -> None:
        self._config = config
        self._target = target
        self._source = source
        self._prompt = prompt
        self._encoder = encoder
        self._engine = engine
        self._params = params
        self._generation = TextGeneration(engine.client, engine.tokenizer)
        self._rows: dict[int, Row] = {}
        """Rows in the engine."""
        self._num_read = 0
        self._started_at = time.monotonic()
        passthrough = source.arrow_schema(prompt)
        schema = output_schema(
            passthrough,
            output_column=config.output_column,
            return_token_ids=config.return_token_ids,
        )
        self._sink = ParquetSink(
            target=target,
            schema=schema,
            encoder=ColumnEncoder(passthrough),
            rows_per_part=config.rows_per_part,
            metadata=self.metadata,
        )
        self._writer = JobWriter(
            finalize=self._generation.finalize,
            write=self._sink.add,
            return_token_ids=config.return_token_ids,
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known of the run before its first row."""
        return {
            "cbatch_version": __version__,
            "config": resolved_dict(self._config),
            "resolved": {
                "sampling": dataclasses.asdict(self._params),
                "engine": dict(self._engine.description),
            },
        }

    def run(self, on_progress: OnProgress | None) -> dict[str, Any]:
        """Run every row and write the output; returns the summary."""
        self._started_at = time.monotonic()
        try:
            with _ticking(on_progress, self._snapshot):
                for request, output in self._generation.generate(self._requests()):
                    self._writer.put(self._rows.pop(request.key.row), Answer(request, output))
                    if self._writer.error is not None:
                        break
                self._writer.close()
        except BaseException:
            self._sink.abort()
            raise
        wall_s = time.monotonic() - self._started_at
        summary = self._summary(wall_s)
        self._sink.finish({**self.metadata, "totals": summary})
        return summary

    def _requests(self) -> Iterator[Request]:
        """Requests for the engine; rows that end before it go straight to the writer."""
        rows = self._source.rows(self._prompt)
        size = 1
        while batch := list(islice(rows, size)):
            size = min(2 * size, _LARGEST_BATCH)
            self._num_read += len(batch)
            for row, prompt in zip(batch, self._encoder.encode(batch), strict=True):
                if isinstance(prompt, RowError):
                    self._writer.put(row, prompt)
                    continue
                self._rows[row.index] = row
                yield Request(
                    key=RequestKey(row.index),
                    prompt_token_ids=prompt.token_ids,
                    params=prompt.params,
                )

    def _snapshot(self) -> RunSnapshot:
        counts, stats = self._writer.counts, self._engine.client.stats
        elapsed_s = time.monotonic() - self._started_at
        rows_total = self._source.num_rows
        return RunSnapshot(
            elapsed_s=elapsed_s,
            rows_done=counts.num_done,
            rows_failed=counts.num_failed,
            rows_total=rows_total,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            prompt_tokens=stats.num_prompt_tokens,
            output_tokens=stats.num_output_tokens,
            eta_s=self._eta(elapsed_s, counts.num_done),
        )

    def _eta(self, elapsed_s: float, num_done: int) -> float | None:
        """Seconds left: the tokens that remain at the rate of those computed so far.

        Rows that are done say how many tokens a row takes; the share of the input that is read
        says how many rows remain.
        """
        stats = self._engine.client.stats
        fraction = self._source.fraction_read
        if not num_done or not fraction:
            return None
        tokens_done = stats.num_prompt_tokens + stats.num_output_tokens
        num_rows = self._source.num_rows or self._num_read / fraction
        tokens_total = tokens_done / num_done * num_rows
        tokens_computed = max(stats.num_computed_tokens + stats.num_cached_tokens, 1)
        return max(0.0, tokens_total - tokens_computed) * elapsed_s / tokens_computed

    def _summary(self, wall_s: float) -> dict[str, Any]:
        counts = self._writer.counts
        engine_summary = self._engine.client.stats.summary()
        return {
            "rows": counts.num_done,
            "rows_ok": counts.num_ok,
            "rows_failed": counts.num_failed,
            "rows_resumed": 0,
            "errors": dict(counts.errors),
            "wall_s": round(wall_s, 4),
            "load_s": round(self._engine.load_s, 4),
            **engine_summary,
            "output": str(self._target.path),
            "resolved": self.metadata["resolved"],
        }


class _ticking:
    """While the block runs, hands a snapshot to `on_progress` twice a second."""

    def __init__(self, on_progress: OnProgress | None, snapshot: Callable[[], RunSnapshot]) -> None:
        self._on_progress = on_progress
        self._snapshot = snapshot
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="cbatch-progress", daemon=True)

    def __enter__(self) -> None:
        if self._on_progress is not None:
            self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._on_progress is not None:
            self._done.set()
            self._thread.join()
            self._on_progress(self._snapshot())

    def _tick(self) -> None:
        assert self._on_progress is not None
        while not self._done.wait(_PROGRESS_INTERVAL_S):
            self._on_progress(self._snapshot())


def _describe(params: SamplingParams) -> str:
    """The run's sampling on one line, without what is switched off."""
    values = dataclasses.asdict(params)
    shown = {name: value for name, value in values.items() if value or name == "temperature"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
