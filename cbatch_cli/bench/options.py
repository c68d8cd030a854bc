"""The options of `cbatch bench` that `cbatch run` does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbatch_cli.bench.config import NUM_MADE_UP, REPEAT, SCHEDULERS
from cbatch_cli.bench.suite import SuiteName
from cbatch_cli.cli_help import choices, flag, option

Workload = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WORKLOAD]",
        help="Files of prompts, read as by cbatch run, with a row's own sampling_params. Without "
        "any, rows are made up: random tokens, prompts and answers of very different lengths.",
        rich_help_panel="Benchmark",
        show_default=False,
    ),
]
NumPrompts = Annotated[
    int | None,
    option(
        "Benchmark",
        "--num-prompts",
        "N",
        f"Use the first N rows of the files, or make up N rows. [default: all, or {NUM_MADE_UP}]",
    ),
]
Schedulers = Annotated[
    str | None,
    option(
        "Benchmark",
        "--schedulers",
        ",".join(SCHEDULERS),
        "What to compare; static runs a batch of rows to its end before it takes the next. "
        f"[default: {','.join(SCHEDULERS)}]",
    ),
]
WithGenerate = Annotated[
    bool,
    flag(
        "Benchmark",
        "--generate",
        "Compare with transformers' generate too: padded batches, and the weights loaded twice.",
    ),
]
Repeat = Annotated[
    int,
    option(
        "Benchmark",
        "--repeat",
        "N",
        f"Run everything N times, in turn, and show the median. [default: {REPEAT}]",
    ),
]
Seed = Annotated[
    int | None,
    option("Benchmark", "--seed", "N", "Seed of the rows that are made up, and of sampling."),
]
Suite = Annotated[
    SuiteName | None,
    option(
        "Benchmark",
        "--suite",
        choices(SuiteName),
        "Measure a whole machine. cpu: what it reaches, where the time of the workload goes, and "
        "which settings are fastest, which later runs take as defaults. gpu: kernels and models "
        "of random weights.",
    ),
]
JsonFile = Annotated[
    Path | None,
    option("Benchmark", "--json-file", "FILE.json", "Write all numbers there too, as JSON."),
]
Json = Annotated[
    bool, flag("Terminal", "--json", "Print all numbers as one JSON object instead of a table.")
]
