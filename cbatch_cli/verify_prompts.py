"""The prompts of finished rows, made from what their output holds or from the input again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cbatch_cli.config import JobConfig
from cbatch_cli.data.fingerprint import inputs_digest, inputs_identity
from cbatch_cli.data.finished_rows import AnsweredRow, OutputSample
from cbatch_cli.data.job_input import open_job_input
from cbatch_cli.data.prompt_columns import SAMPLING_COLUMN, PromptColumns, choose_prompt_columns
from cbatch_cli.data.row import Row
from cbatch_cli.errors import UsageError

BY_HAND = "name the input with --input"


def rows_of_output(config: JobConfig, sample: OutputSample) -> tuple[list[Row], PromptColumns]:
    """The rows drawn, and which of the columns that the output kept make their prompts.

    Raises `UsageError` where it did not keep these.
    """
    if not sample.column_names:
        raise UsageError(f"the output does not hold the prompts, for no column was kept; {BY_HAND}")
    try:
        prompt = choose_prompt_columns(
            sample.column_names,
            prompt_column=config.prompt_column,
            messages_column=config.messages_column,
            has_template=config.template is not None,
            is_openai=config.input_format == "openai" or _holds_openai(sample.column_names),
        )
    except UsageError as error:
        raise UsageError(f"the output does not hold the prompts: {error}; {BY_HAND}") from None
    return [entry.row for entry in sample.answered], prompt


def rows_of_input(
    config: JobConfig, sample: OutputSample, note: Mapping[str, Any]
) -> tuple[list[Row], PromptColumns]:
    """The rows drawn as the input of `config` has them now, and which columns make their prompts.

    `note` is what the output's metadata says. Raises `UsageError` for an input that is not the one
    that the run read, as far as the columns that the output kept or its metadata tell.
    """
    source, prompt = open_job_input(config)
    names = ", ".join(config.inputs)
    kept_all = note["config"]["columns"] == "all"
    if kept_all and prompt.column not in (None, *sample.column_names):
        raise UsageError(
            f"{names} is not the input of this output, which has no column {prompt.column!r}"
        )
    if not kept_all and not _holds_prompts(prompt, sample.column_names):
        digest = note.get("identity", {}).get("inputs")
        if digest not in (None, inputs_digest(inputs_identity(source.files))):
            raise UsageError(
                f"{names} is not what the run read, or was changed since, and the output has not "
                "kept the columns that would tell whether the prompts are the same"
            )
    compared = [
        name
        for name in sample.column_names
        if prompt.columns_read is None or name in prompt.columns_read
    ]
    wanted = {entry.row.index: entry for entry in sample.answered}
    rows: list[Row] = []
    for row in source.rows(prompt):
        if len(rows) == len(wanted):
            break
        if row.index in wanted:
            _check_same_row(wanted[row.index], row, compared, names)
            rows.append(row)
    if len(rows) < len(wanted):
        raise UsageError(f"{names} has fewer rows than the output")
    return rows, prompt


def _holds_openai(names: Sequence[str]) -> bool:
    return {"custom_id", "body", "url", "method"} <= set(names)


def _holds_prompts(prompt: PromptColumns, kept: Sequence[str]) -> bool:
    """Whether everything that a prompt is made from is surely among the columns kept."""
    read = prompt.columns_read
    return read is not None and read - {SAMPLING_COLUMN} <= set(kept)


def _check_same_row(
    entry: AnsweredRow, row: Row, compared: Sequence[str], input_names: str
) -> None:
    if row.error is not None:
        raise UsageError(
            f"row {row.index} of {input_names} cannot be read, and has an answer in the output: "
            f"{row.error.message}"
        )
    for name in compared:
        if name in entry.row.columns and not _is_same(
            entry.row.columns[name], row.columns.get(name)
        ):
            raise UsageError(
                f"row {row.index} of {input_names} has another {name!r} than the output, so it is "
                "not the input of this output"
            )


def _is_same(kept: Any, value: Any) -> bool:
    """Whether an output keeps this `value` of an input as `kept`, with what its types change."""
    if kept is None:
        # NaN, and numbers that no column holds, become null.
        return value is None or isinstance(value, int | float)
    if isinstance(kept, Mapping) and isinstance(value, Mapping):
        # A struct has a null where an object lacks a key.
        return all(_is_same(kept.get(key), value.get(key)) for key in {*kept, *value})
    if isinstance(kept, list) and isinstance(value, list):
        return len(kept) == len(value) and all(map(_is_same, kept, value))
    return bool(kept == value)
