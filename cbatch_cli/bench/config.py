"""Settings of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cbatch_cli.config import JobConfig, SchedulerName, build_job_config
from cbatch_cli.errors import UsageError

SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)
NUM_MADE_UP = 64
REPEAT = 3

# A job must name an input; this one is never opened.
_NO_INPUT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What runs against what. Raises `ValueError` naming field, value and range."""

    job: JobConfig
    """The model, the engine but for its scheduler, and how rows are read and sampled."""
    num_made_up: int | None = None
    """Rows to make up, by the engine's seed, in place of the job's inputs."""
    schedulers: tuple[SchedulerName, ...] = SCHEDULERS
    with_generate: bool = False
    """Whether transformers' padded `generate` runs too."""
    repeat: int = REPEAT

    def __post_init__(self) -> None:
        for scheduler in self.schedulers:
            if scheduler not in SCHEDULERS:
                known = ", ".join(SCHEDULERS)
                raise ValueError(f"schedulers must be of {known}, not {scheduler!r}")
        if len(set(self.schedulers)) < len(self.schedulers):
            raise ValueError(f"schedulers must differ, not be {', '.join(self.schedulers)}")
        if not self.schedulers and not self.with_generate:
            raise ValueError("schedulers must name at least one, or generate must run")
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat}")


def build_bench_config(
    options: Mapping[str, Any],
    *,
    inputs: Sequence[str] = (),
    num_prompts: int | None = None,
    schedulers: str | None = None,
    with_generate: bool = False,
    repeat: int = REPEAT,
    config_file: Path | None = None,
) -> BenchConfig:
    """A `BenchConfig` from flags, the environment and a TOML file, as for a job.

    `num_prompts` cuts the inputs short, or says how many rows to make up where there are none;
    `schedulers` are separated by commas. Raises `UsageError`.
    """
    if num_prompts is not None and num_prompts < 1:
        raise UsageError(f"num_prompts must be at least 1, not {num_prompts}")
    given = {**options, "inputs": tuple(inputs) or (_NO_INPUT,), "limit": num_prompts}
    job = build_job_config(given, config_file=config_file)
    names = SCHEDULERS if schedulers is None else schedulers.split(",")
    try:
        return BenchConfig(
            job=job,
            num_made_up=None if inputs else num_prompts or NUM_MADE_UP,
            schedulers=tuple(name.strip() for name in names if name.strip()),  # type: ignore[misc]
            with_generate=with_generate,
            repeat=repeat,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
