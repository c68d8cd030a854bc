"""Settings of a run, validated, frozen. Precedence: flag, then `CBATCH_*`, then a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch_cli.errors import UsageError

ENV_PREFIX = "CBATCH_"
DEMO_MODEL = "gemma-3-270m"

InputFormat = Literal["auto", "jsonl", "parquet", "csv", "openai"]
SchedulerName = Literal["continuous", "static"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
ProgressName = Literal["auto", "plain", "json", "none"]


def _check_choices(config: Any) -> None:
    """Raise `ValueError` for a field whose type is a `Literal` that lacks its value."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise ValueError(f"{name} must be one of {choices}, not {value!r}")


def _at_least(config: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, not {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the engine runs. Raises `ValueError` naming field, value and range.

    `None` means: chosen from the device, the model and the free memory.
    """

    max_num_seqs: int | None = None
    """Sequences running at once."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step, prefill and decode together."""
    block_size: int | None = None
    """Token positions in one KV block."""
    num_kv_blocks: int | None = None
    """Exact size of the KV pool in blocks; set by tests, else derived from memory."""
    kv_cache_memory: int | None = None
    """Size of the KV pool in bytes."""
    gpu_memory_utilization: float = 0.92
    max_model_len: int | None = None
    """Longest prompt plus output in tokens."""
    dtype: DtypeName = "auto"
    device: str = "auto"
    scheduler: SchedulerName = "continuous"
    prefix_caching: bool = True
    seed: int = 0
    """Run seed of the sampling noise."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "block_size")
        _at_least(self, 1, "num_kv_blocks", "kv_cache_memory")
        _at_least(self, 2, "max_model_len")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                "gpu_memory_utilization must be above 0 and at most 1, "
                f"not {self.gpu_memory_utilization}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, not {self.seed}")
        device, _, index = self.device.partition(":")
        if device not in ("auto", "cpu", "cuda") or (index and not index.isdigit()):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One batch job: where rows come from, what is asked, where answers go."""

    inputs: tuple[str, ...]
    output: str | None = None
    model: str = DEMO_MODEL
    input_format: InputFormat = "auto"
    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    """Jinja text over the row's columns, or `@FILE`."""
    system: str | None = None
    chat: bool | None = None
    columns: str = "all"
    """Columns passed through: `all`, `none`, or a comma-separated list."""
    limit: int | None = None
    max_line_bytes: int = 64 * 2**20
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    output_column: str = "completion"
    rows_per_part: int = 16_384
    return_token_ids: bool = False
    overwrite: bool = False
    allow_errors: bool = False
    progress: ProgressName = "auto"
    engine: EngineConfig = EngineConfig()

    def __post_init__(self) -> None:
        _check_choices(self)
        _at_least(self, 1, "limit", "max_line_bytes", "rows_per_part")
        if not self.inputs:
            raise ValueError("inputs must name at least one file")
        if self.template is not None and (self.prompt_column or self.messages_column):
            raise ValueError("template cannot be combined with prompt_column or messages_column")
        if self.prompt_column and self.messages_column:
            raise ValueError("prompt_column cannot be combined with messages_column")


JOB_FIELDS = {f.name for f in dataclasses.fields(JobConfig) if f.name != "engine"}
ENGINE_FIELDS = {f.name for f in dataclasses.fields(EngineConfig)}
_HINTS = {**typing.get_type_hints(EngineConfig), **typing.get_type_hints(JobConfig)}


def build_job_config(
    options: Mapping[str, Any], *, config_file: Path | None = None
) -> JobConfig:
    """A `JobConfig` from `options` (None: not given), the environment and a TOML file.

    Raises `UsageError` for an unknown key, naming the nearest known one, and for a bad value.
    """
    merged: dict[str, Any] = {}
    if config_file is not None:
        merged.update(_read_toml(config_file))
    merged.update(_read_environment())
    merged.update({name: value for name, value in options.items() if value is not None})
    job = {name: value for name, value in merged.items() if name in JOB_FIELDS}
    engine = {name: value for name, value in merged.items() if name in ENGINE_FIELDS}
    try:
        return JobConfig(**job, engine=EngineConfig(**engine))
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None


def resolved_dict(config: JobConfig) -> dict[str, Any]:
    """The whole configuration as plain values, for metadata and `--dump-config`."""
    return dataclasses.asdict(config)


def unknown_key_message(name: str, where: str) -> str:
    """A sentence that names the nearest known setting."""
    near = difflib.get_close_matches(name, JOB_FIELDS | ENGINE_FIELDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown setting {name!r} in {where}{hint}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in JOB_FIELDS | ENGINE_FIELDS:
            raise UsageError(unknown_key_message(name, str(path)))
        values[name] = _coerce(name, value, str(path))
    return values


def _read_environment() -> dict[str, Any]:
    values = {}
    for key, text in os.environ.items():
        if not key.startswith(ENV_PREFIX):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name == "cache":  # where converted models are kept; not a setting of a job
            continue
        if name not in JOB_FIELDS | ENGINE_FIELDS:
            raise UsageError(unknown_key_message(name, "the environment"))
        values[name] = _coerce(name, text, key)
    return values


def _coerce(name: str, value: Any, where: str) -> Any:
    """Convert text or a TOML value to the field's type. Raises `UsageError`."""
    hint = _HINTS[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = next(k for k in kinds if k is not types.NoneType)
    try:
        if typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            items = [value] if isinstance(value, str | int) else value
            return tuple(item(entry) for entry in items)
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"1": True, "true": True, "0": False, "false": False}[str(value).lower()]
        if typing.get_origin(kind) is Literal:
            return str(value)
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, KeyError):
        raise UsageError(f"{where}: {name} cannot be {value!r}") from None
