"""Opening the input that a job's configuration describes."""

from __future__ import annotations

from pathlib import Path

from cbatch_cli.config import JobConfig
from cbatch_cli.data.prompt_columns import PromptColumns, choose_prompt_columns
from cbatch_cli.data.sources import Source, open_source


def open_job_input(
    config: JobConfig, *, spool_dir: Path | None = None
) -> tuple[Source, PromptColumns]:
    """The rows of a job and which of their columns make the prompt.

    Raises `UsageError` for what cannot be read and for columns that are not there.
    """
    source = open_source(
        config.inputs,
        input_format=config.input_format,
        columns=config.columns,
        limit=config.limit,
        max_line_bytes=config.max_line_bytes,
        spool_dir=spool_dir,
    )
    prompt = choose_prompt_columns(
        source.column_names,
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        has_template=config.template is not None,
        is_openai=source.is_openai,
    )
    return source, prompt
