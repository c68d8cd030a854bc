"""Running some rows of a finished output again, in another batch, and comparing the answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch_cli.assembly import (
    DEFAULT_LOADER,
    EngineLoader,
    LoadedEngine,
    Log,
    print_nothing,
)
from cbatch_cli.config import ENGINE_FIELDS, JOB_FIELDS, EngineConfig, JobConfig
from cbatch_cli.data.finished_rows import OutputSample, sample_output
from cbatch_cli.data.job_input import open_job_input
from cbatch_cli.data.output_target import resolve_target
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.data.prompt_columns import PromptColumns, choose_prompt_columns
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.errors import RowError, UsageError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.request import Request, RequestKey, RequestOutput, SamplingParams
from cbatch_cli.text.prompts import PromptEncoder
from cbatch_cli.text.templates import read_template

NUM_ROWS = 16

# Few at a time and in pieces, so that no row has the neighbours or the chunks that it had.
_NUM_SEQS = 3
_LEAST_BUDGET = 16
_BY_HAND = "name the input with --input"


def verify_output(
    output: str,
    *,
    num_rows: int = NUM_ROWS,
    seed: int = 0,
    inputs: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    log: Log = print_nothing,
    loader: EngineLoader = DEFAULT_LOADER,
) -> dict[str, Any]:
    """Run `num_rows` rows of a finished output again, as its metadata says, and compare.

    Rows are drawn by `seed`, those with an error left out. Their prompts are made from the columns
    of the output, or from `inputs`. `changes` are settings of this machine that go before those
    recorded. Returns what was found, as plain values. Raises `UsageError` for what is no finished
    output of a run, and where prompts cannot be made again.
    """
    target = resolve_target(output, ())
    files = target.files() if target.path.exists() else []
    if not files:
        raise UsageError(f"{target.path} is not there, or not finished")
    note = read_note(files[-1], METADATA_KEY)
    if "totals" not in note:
        raise UsageError(f"{files[-1]} does not tell of a finished run of cbatch")
    config = _recorded_config(note, inputs, changes or {}, str(files[-1]))
    sample = sample_output(
        files, num_rows=num_rows, seed=seed, with_token_ids=config.return_token_ids
    )
    rows, prompt = _rows_with_prompts(config, sample, from_input=bool(inputs))
    commit = note["resolved"]["engine"].get("commit")
    if commit is not None and config.model == note["config"]["model"]:
        found = loader.identify(config.model)
        if commit != found:
            raise UsageError(
                f"{config.model} was at {commit} when {target.path} was made, and is at {found}"
            )
    outputs: dict[int, RequestOutput] = {}
    if rows:
        log(f"loading {config.model}")
        engine = loader.load(config.model, config.engine, log)
        log(f"running {len(rows)} of {sample.num_rows:,} rows again")
        outputs = _run_again(config, note, engine, rows, prompt, seed=seed)
    differences = [
        difference
        for entry in sample.answered
        if (difference := _difference(entry.result, outputs[entry.row.index])) is not None
    ]
    return {
        "output": str(target.path),
        "rows": sample.num_rows,
        "rows_failed": sample.num_failed,
        "rows_compared": len(rows),
        "rows_equal": len(rows) - len(differences),
        "rows_different": len(differences),
        "compared": "token ids" if config.return_token_ids else "texts",
        "differences": [dataclasses.asdict(difference) for difference in differences],
    }


def verify_text(result: Mapping[str, Any]) -> str:
    """A few lines that say which rows differ, and where first.

    `result` is what `verify_output` returns.
    """
    failed = result["rows_failed"]
    lines = [
        f"{result['output']}: {result['compared']} of {result['rows_compared']} of "
        f"{result['rows']:,} rows compared, {result['rows_equal']} equal, "
        f"{result['rows_different']} different"
        + (f"; {failed:,} rows with an error were left out" if failed else "")
    ]
    for difference in result["differences"]:
        lines.append(
            f"row {difference['row_index']} differs from position {difference['position']} on: "
            f"{difference['was']!r} in the output, {difference['now']!r} now"
        )
    return "\n".join([*lines, ""])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """Where an answer and the one made now first differ: a token's id, or a piece of text."""

    row_index: int
    position: int
    was: int | str | None
    now: int | str | None


def _recorded_config(
    note: Mapping[str, Any], inputs: Sequence[str], changes: Mapping[str, Any], path: str
) -> JobConfig:
    """The job's configuration, changed to run a few rows in other batches."""
    recorded = dict(note["config"])
    engine = dict(recorded.pop("engine"))
    resolved = note["resolved"]["engine"]
    if unknown := sorted({*recorded} - JOB_FIELDS | ({*engine} - ENGINE_FIELDS)):
        raise UsageError(f"{path} was made by cbatch {note['cbatch_version']} with {unknown[0]!r}")
    budget = resolved.get("max_num_batched_tokens") or _LEAST_BUDGET
    engine |= {
        "dtype": resolved.get("dtype", engine["dtype"]),
        "max_model_len": resolved.get("max_model_len", engine["max_model_len"]),
        "max_num_seqs": _NUM_SEQS,
        "max_num_batched_tokens": max(budget // 2, _LEAST_BUDGET),
        "num_kv_blocks": None,
        "scheduler": "continuous",
        "prefix_caching": False,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    engine |= {name: value for name, value in given.items() if name in ENGINE_FIELDS}
    recorded |= {name: value for name, value in given.items() if name in JOB_FIELDS}
    recorded |= {"inputs": tuple(inputs) or recorded["inputs"], "shard": None}
    if inputs:
        # All columns may be needed, whatever was passed through.
        recorded |= {"columns": "all"}
    for name, value in recorded.items():
        if isinstance(value, list):
            recorded[name] = tuple(value)
    try:
        return JobConfig(**recorded, engine=EngineConfig(**engine))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} was made with other settings than there are: {error}") from None


def _rows_with_prompts(
    config: JobConfig, sample: OutputSample, *, from_input: bool
) -> tuple[list[Row], PromptColumns]:
    """The rows to run, and which of their columns make the prompt."""
    if from_input:
        source, prompt = open_job_input(config)
        wanted = {entry.row.index for entry in sample.answered}
        rows = []
        for row in source.rows(prompt):
            if row.index in wanted:
                rows.append(row)
                if len(rows) == len(wanted):
                    break
        if len(rows) < len(wanted):
            raise UsageError(f"{', '.join(config.inputs)} has fewer rows than the output")
        return rows, prompt
    if not sample.column_names:
        raise UsageError(
            f"the output does not hold the prompts, for no column was kept; {_BY_HAND}"
        )
    try:
        prompt = choose_prompt_columns(
            sample.column_names,
            prompt_column=config.prompt_column,
            messages_column=config.messages_column,
            has_template=config.template is not None,
            is_openai=config.input_format == "openai" or _holds_openai(sample.column_names),
        )
    except UsageError as error:
        raise UsageError(f"the output does not hold the prompts: {error}; {_BY_HAND}") from None
    return [entry.row for entry in sample.answered], prompt


def _holds_openai(names: Sequence[str]) -> bool:
    return {"custom_id", "body", "url", "method"} <= set(names)


def _run_again(
    config: JobConfig,
    note: Mapping[str, Any],
    engine: LoadedEngine,
    rows: Sequence[Row],
    prompt: PromptColumns,
    *,
    seed: int,
) -> dict[int, RequestOutput]:
    """What the engine makes of the rows now, by the row's index."""
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in note["resolved"]["sampling"].items()
    }
    encoder = PromptEncoder(
        tokenizer=engine.tokenizer,
        prompt=prompt,
        template=None if config.template is None else read_template(config.template),
        system=config.system,
        chat=config.chat,
        defaults=SamplingParams(**sampling),
        max_model_len=engine.description["max_model_len"],
        kv_capacity_tokens=engine.client.max_sequence_tokens,
    )
    try:
        requests = list(_requests(encoder, rows))
    finally:
        encoder.close()
    random.Random(seed).shuffle(requests)
    generation = TextGeneration(engine.client, engine.tokenizer)
    return {
        request.key.row: generation.finalize(request, output)
        for request, output in generation.generate(requests)
    }


def _requests(encoder: PromptEncoder, rows: Sequence[Row]) -> Iterator[Request]:
    for row, encoded in zip(rows, encoder.encode(rows), strict=True):
        if isinstance(encoded, RowError):
            raise UsageError(
                f"the prompt of row {row.index} cannot be made again: {encoded.message}; {_BY_HAND}"
            )
        yield Request(
            key=RequestKey(row.index),
            prompt_token_ids=encoded.token_ids,
            params=encoded.params,
        )


def _difference(was: RowResult, now: RequestOutput) -> _Difference | None:
    """Where the answers part; None if they do not. Raises `UsageError` for another prompt."""
    if now.error is not None:
        return _Difference(
            row_index=was.row_index, position=0, was=was.completion, now=now.error.message
        )
    if was.metrics.prompt_tokens != now.metrics.prompt_tokens:
        raise UsageError(
            f"the prompt of row {was.row_index} had {was.metrics.prompt_tokens} tokens and has "
            f"{now.metrics.prompt_tokens} now, so it is another prompt or tokenizer; {_BY_HAND}"
        )
    if was.token_ids is not None:
        ids, new_ids = was.token_ids, now.token_ids
        if ids == new_ids:
            return None
        position = _first_difference(ids, new_ids)
        return _Difference(
            row_index=was.row_index,
            position=position,
            was=ids[position] if position < len(ids) else None,
            now=new_ids[position] if position < len(new_ids) else None,
        )
    text, new_text = was.completion or "", now.text or ""
    if text == new_text:
        return None
    position = _first_difference(text, new_text)
    end = position + 20
    return _Difference(
        row_index=was.row_index,
        position=position,
        was=text[position:end],
        now=new_text[position:end],
    )


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))
