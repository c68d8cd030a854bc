"""What `--dry-run` says: the input is opened and its columns are chosen, no model is loaded."""

from __future__ import annotations

import os
from typing import Any

from cbatch_cli.config import JobConfig
from cbatch_cli.data.job_input import open_job_input
from cbatch_cli.data.output_schema import output_schema
from cbatch_cli.data.output_target import resolve_target
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.shard import resolve_shard
from cbatch_cli.text.templates import load_template


def describe_job(config: JobConfig) -> dict[str, Any]:
    """What `config` would run, as plain values. Raises `UsageError` as the run itself would.

    Standard input is read to its end.
    """
    shard = resolve_shard(config.shard, os.environ)
    target = resolve_target(config.output, config.inputs, shard)
    source, prompt = open_job_input(config)
    if config.template is not None:
        load_template(config.template)
    schema = output_schema(
        source.arrow_schema(prompt),
        output_column=config.output_column,
        return_token_ids=config.return_token_ids,
    )
    return {
        "inputs": list(config.inputs),
        "rows": source.num_rows,
        "limit": config.limit,
        "prompt": _describe_prompt(prompt),
        "output": str(target.path),
        "output_columns": {field.name: str(field.type) for field in schema},
        "model": config.model,
        "sampling": config.sampling_options,
    }


def dry_run_text(description: dict[str, Any]) -> str:
    """The description for people, one line each."""
    rows, limit = description["rows"], description["limit"]
    at_most = "" if limit is None else f", at most {limit:,}"
    sampling = [f"{name}={value!r}" for name, value in description["sampling"].items()]
    lines = {
        "inputs": ", ".join(description["inputs"]),
        "rows": f"not known before they are read{at_most}" if rows is None else f"{rows:,}",
        "prompt": description["prompt"],
        "output": description["output"],
        "columns": ", ".join(description["output_columns"]),
        "model": description["model"],
        "sampling": ", ".join(sampling) or "as the model's generation config says",
    }
    return "".join(f"{name:<9}{value}\n" for name, value in lines.items())


def _describe_prompt(prompt: PromptColumns) -> str:
    if prompt.kind == "template":
        return "the template"
    if prompt.kind == "openai":
        return "the body of each OpenAI batch line"
    if prompt.input_column is not None:
        return f"columns {prompt.column!r} and {prompt.input_column!r}"
    how = " through the chat template" if prompt.kind == "messages" else ""
    return f"column {prompt.column!r}{how}"
