"""Running some rows of a finished output again, in another batch, and comparing the answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cbatch_cli.assembly import (
    DEFAULT_LOADER,
    EngineLoader,
    LoadedEngine,
    Log,
    print_nothing,
)
from cbatch_cli.config import ENGINE_FIELDS, JOB_FIELDS, EngineConfig, JobConfig
from cbatch_cli.data.finished_rows import WrittenRows, sample_output
from cbatch_cli.data.output_target import named_target
from cbatch_cli.data.parquet_file import METADATA_KEY, read_note
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import Row
from cbatch_cli.errors import RowError, UsageError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.request import Request, RequestKey, RequestOutput, SamplingParams
from cbatch_cli.shard import WHOLE, Shard
from cbatch_cli.text.prompts import PromptEncoder
from cbatch_cli.text.templates import read_template
from cbatch_cli.verify_prompts import BY_HAND, rows_of_input, rows_of_output
from cbatch_cli.verify_result import find_difference

NUM_ROWS = 16

# Few at a time and in pieces, so that no row has the neighbours or the chunks that it had.
_NUM_SEQS = 3
_LEAST_BUDGET = 16


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
    recorded; a model that is among them may be another one, of which `warnings` in the result
    tell. Returns what was found, as plain values. Raises `UsageError` for what is no finished
    output of a run or has lost rows or columns, for a model or an input that is not that of the
    run, and where prompts cannot be made again.
    """
    target = named_target(output)
    files = target.files() if target.path.exists() else []
    if not files:
        raise UsageError(f"{target.path} is not there, or not finished")
    note = read_note(files[-1], METADATA_KEY)
    if "totals" not in note:
        raise UsageError(f"{files[-1]} does not tell of a finished run of cbatch")
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    config = _recorded_config(note, inputs, changes, str(files[-1]))
    written = _written_rows(note, config)
    sample = sample_output(files, written, num_rows=num_rows, seed=seed)
    rows, prompt = rows_of_input(config, sample, note) if inputs else rows_of_output(config, sample)
    warnings = []
    if (change := _model_change(note, config, loader, str(target.path))) is not None:
        if "model" not in changes:
            raise UsageError(f"{change}; name a model with -m to compare its answers all the same")
        warnings.append(change)
        log(f"warning: {change}")
    outputs: dict[int, RequestOutput] = {}
    if rows:
        log(f"loading {config.model}")
        engine = loader.load(config.model, config.engine, log)
        log(f"running {len(rows)} of {sample.num_rows:,} rows again")
        outputs = _run_again(config, note, engine, rows, prompt, seed=seed)
    differences = [
        difference
        for entry in sample.answered
        if (difference := find_difference(entry.result, outputs[entry.row.index])) is not None
    ]
    return {
        "output": str(target.path),
        "model": config.model,
        "rows": sample.num_rows,
        "rows_failed": sample.num_failed,
        "rows_compared": len(rows),
        "rows_equal": len(rows) - len(differences),
        "rows_different": len(differences),
        "compared": "token ids" if config.return_token_ids else "texts",
        "differences": [dataclasses.asdict(difference) for difference in differences],
        "warnings": warnings,
    }


def _written_rows(note: Mapping[str, Any], config: JobConfig) -> WrittenRows:
    """What the metadata says of the rows; `config.shard` is that of the rows to run."""
    totals = note["totals"]
    shard = totals.get("shard")
    return WrittenRows(
        num_rows=totals["rows"],
        num_failed=totals["rows_failed"],
        rows_per_part=config.rows_per_part,
        shard=WHOLE if shard is None else Shard(shard["index"], shard["count"]),
        output_column=config.output_column,
        with_token_ids=config.return_token_ids,
    )


def _model_change(
    note: Mapping[str, Any], config: JobConfig, loader: EngineLoader, output: str
) -> str | None:
    """A sentence on the model, if it is another one than the metadata names."""
    name, commit = note["config"]["model"], note["resolved"]["engine"].get("commit")
    recorded = note.get("identity", {}).get("model", commit)
    if recorded is None:
        return None
    found = loader.identify(config.model)
    if found == recorded:
        return None
    return f"{output} was made by {name} at {recorded}, and {config.model} is at {found}"


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
    engine |= {name: value for name, value in changes.items() if name in ENGINE_FIELDS}
    recorded |= {name: value for name, value in changes.items() if name in JOB_FIELDS}
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
                f"the prompt of row {row.index} cannot be made again: {encoded.message}; {BY_HAND}"
            )
        yield Request(
            key=RequestKey(row.index),
            prompt_token_ids=encoded.token_ids,
            params=encoded.params,
        )
