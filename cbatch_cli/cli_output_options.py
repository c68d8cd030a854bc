"""The arguments of the commands that look at an output: one annotated type each."""

from __future__ import annotations

from typing import Annotated

import typer

from cbatch_cli.cli_help import choices, flag, option
from cbatch_cli.config import AttentionBackendChoice

Target = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="What -o named, or the default name: a .parquet file, or a folder with a slash.",
        rich_help_panel="Output",
        show_default=False,
    ),
]
MergeTarget = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="What -o named in the commands of the shards: a .parquet file, or a folder with a "
        "slash. The shards are those beside it.",
        rich_help_panel="Output",
        show_default=False,
    ),
]
RemoveShards = Annotated[
    bool, flag("Output", "--remove-shards", "Remove the outputs of the shards at the end.")
]
NumRows = Annotated[
    int, option("Output", "--rows", "N", "Rows to run again, those with an answer. [default: 16]")
]
DrawSeed = Annotated[
    int, option("Output", "--seed", "N", "Which rows are drawn, and in which order they run.")
]
VerifyInputs = Annotated[
    list[str] | None,
    option(
        "Input",
        "--input",
        "INPUT",
        "Take the prompts from the input again, as cbatch run reads it, rather than from the "
        "columns of the output. May be repeated.",
    ),
]
VerifyModel = Annotated[
    str | None,
    option(
        "Engine",
        "--model -m",
        "MODEL",
        "Where the model is now, if not where the run found it. For another model than that of "
        "the run there is a warning.",
        with_default=False,
    ),
]
VerifyDevice = Annotated[
    str | None,
    option(
        "Engine",
        "--device",
        "auto|cpu|cuda[:N]",
        "Where to run, if not as the run did.",
        with_default=False,
    ),
]
VerifyBackend = Annotated[
    AttentionBackendChoice | None,
    option(
        "Engine",
        "--attention-backend",
        choices(AttentionBackendChoice),
        "Which attention to run, if not that of the run.",
        with_default=False,
    ),
]
Json = Annotated[bool, flag("Terminal", "--json", "Print one JSON object on standard output.")]
