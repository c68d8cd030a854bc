"""The arguments of the commands that look at an output: one annotated type each."""

from __future__ import annotations

from typing import Annotated

import typer

from cbatch_cli.cli_help import flag

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
Json = Annotated[bool, flag("Terminal", "--json", "Print one JSON object on standard output.")]
