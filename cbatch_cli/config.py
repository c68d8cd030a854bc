"""Settings of a run, validated, frozen. Precedence: flag, then `CBATCH_*`, then a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cbatch_cli.config_values import ByteCount, convert, kind_of, parse_text
from cbatch_cli.errors import UsageError
from cbatch_cli.request import SAMPLING_FIELDS, SamplingParams
from cbatch_cli.shard import SLURM, parse_shard

ENV_PREFIX = "CBATCH_"
DEMO_MODEL = "gemma-3-270m"

InputFormat = Literal["auto", "jsonl", "parquet", "csv", "openai"]
SchedulerName = Literal["continuous", "static"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendChoice = Literal["auto", "triton", "cpu", "torch"]
QuantizationName = Literal["none", "w8a16", "w8a8"]
KVCacheDtypeName = Literal["auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]
ProgressName = Literal["auto", "plain", "json", "none"]
OnError = Literal["record", "fail"]


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
    """Exact size of the KV pool in blocks; set by tests, else derived from memory.

    A block holds positions of one KV group: a model with sliding windows has several.
    """
    kv_cache_memory: ByteCount | None = None
    """Size of the KV pool in bytes."""
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """What keys and values are kept in; auto is what the model computes in."""
    gpu_memory_utilization: float = 0.92
    max_model_len: int | None = None
    """Longest prompt plus output in tokens."""
    dtype: DtypeName = "auto"
    device: str = "auto"
    attention_backend: AttentionBackendChoice = "auto"
    quantization: QuantizationName = "none"
    """Weights of 8 bits on a CPU; `w8a16`: activations of 16, `w8a8`: of 8, in groups."""
    deterministic: bool | None = None
    """A row's logits have the same bits whatever runs beside it; None: where that costs nothing.

    On a GPU products and norms run on kernels with fixed tiles.
    """
    overlap: bool | None = None
    """Launch a step while the one before it runs on the GPU; None: where a GPU can."""
    cuda_graphs: bool | None = None
    """Record the steps in which everybody decodes and replay them; None: where that works."""
    scheduler: SchedulerName = "continuous"
    prefix_caching: bool = True
    seed: int = 0
    """Run seed of the sampling noise."""
    trust_remote_code: bool = False
    step_timeout: float = 900.0
    """Seconds after which a step that has not ended ends the run."""

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
        if not self.step_timeout > 0.0:
            raise ValueError(f"step_timeout must be above 0, not {self.step_timeout}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, not {self.seed}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One batch job: where rows come from, what is asked, where answers go.

    A sampling field that is `None` follows the model's generation config. Raises `ValueError`
    naming field, value and range.
    """

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
    shard: str | None = None
    """`i/n`: run the share i of n of the input, into an output of its own; or `slurm`."""
    max_line_bytes: ByteCount = 64 * 2**20
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
    no_resume: bool = False
    """Run an interrupted job from its first row again."""
    retry_errors: bool = False
    """Run the failed rows of an earlier run again."""
    on_error: OnError = "record"
    max_errors: str | None = None
    """Failed rows, as a number or as a percentage of the rows so far, that stop the run."""
    errors_file: str | None = None
    """JSONL file for the failed rows, which can be run again."""
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
        parse_max_errors(self.max_errors)
        if self.shard not in (None, SLURM):
            parse_shard(self.shard)
        for name in ("model", "columns", "output_column"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        # The upper bound of min_tokens is the model's business where max_tokens is not given.
        given = self.sampling_options
        SamplingParams(**{"max_tokens": max(1, given.get("min_tokens", 1)), **given})

    @property
    def sampling_options(self) -> dict[str, Any]:
        """The sampling fields that were given, by their `SamplingParams` names."""
        values = {name: getattr(self, name) for name in sorted(SAMPLING_FIELDS & JOB_FIELDS)}
        return {name: value for name, value in values.items() if value is not None}


JOB_FIELDS = frozenset(f.name for f in dataclasses.fields(JobConfig) if f.name != "engine")
ENGINE_FIELDS = frozenset(f.name for f in dataclasses.fields(EngineConfig))
_KINDS = {
    name: kind_of(hint)
    for config in (EngineConfig, JobConfig)
    for name, hint in typing.get_type_hints(config, include_extras=True).items()
}
_NOT_SETTINGS = frozenset({"cache"})
"""`CBATCH_CACHE` says where converted models and measured defaults are kept, for all jobs."""


def parse_max_errors(text: str | None) -> tuple[int | None, float | None]:
    """The number of failed rows, or their share 0..1, that `max_errors` allows; None for no limit.

    Raises `ValueError` for anything but `N` and `P%`.
    """
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
    if match is None or (match[2] and float(match[2]) > 100):
        raise ValueError(f"max_errors must be a number of rows or a percentage, not {text!r}")
    return (int(match[1]), None) if match[1] else (None, float(match[2]) / 100)


def build_job_config(options: Mapping[str, Any], *, config_file: Path | None = None) -> JobConfig:
    """A `JobConfig` from `options` (None: not given), the environment and a TOML file.

    Raises `UsageError` for an unknown key, naming the nearest known one, and for a bad value.
    """
    merged: dict[str, Any] = {}
    if config_file is not None:
        merged |= _read_toml(config_file)
    merged |= _read_environment(os.environ)
    for name, value in options.items():
        _check_known(name, "the options")
        if value is not None:
            merged[name] = _typed(name, value, "")
    job = {name: value for name, value in merged.items() if name in JOB_FIELDS}
    engine = {name: value for name, value in merged.items() if name in ENGINE_FIELDS}
    job.setdefault("inputs", ())
    try:
        return JobConfig(**job, engine=EngineConfig(**engine))
    except ValueError as error:
        raise UsageError(str(error)) from None


def resolved_dict(config: JobConfig) -> dict[str, Any]:
    """The whole configuration as plain values, for metadata."""
    return dataclasses.asdict(config)


def to_toml(config: JobConfig) -> str:
    """The configuration as a TOML file that `config_file` reads; unset fields are left out."""
    import tomli_w

    values = resolved_dict(config)
    values |= values.pop("engine")
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None})


def _check_known(name: str, where: str) -> None:
    """Raise `UsageError` naming the nearest known setting."""
    known = JOB_FIELDS | ENGINE_FIELDS
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown setting {name!r} in {where}{hint}")


def _typed(name: str, value: Any, where: str) -> Any:
    try:
        return convert(_KINDS[name], value)
    except ValueError as error:
        raise UsageError(f"{where}{name} must be {error}, not {value!r}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        _check_known(name, str(path))
        values[name] = _typed(name, value, f"{path}: ")
    return values


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for key, text in environment.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        if not key.startswith(ENV_PREFIX) or name in _NOT_SETTINGS or not text:
            continue
        _check_known(name, "the environment")
        values[name] = _typed(name, parse_text(_KINDS[name], text), f"{key}: ")
    return values
