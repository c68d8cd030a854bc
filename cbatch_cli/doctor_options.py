"""The options of `cbatch doctor` that `cbatch run` does not have."""

from __future__ import annotations

from typing import Annotated

import typer

from cbatch_cli.cli_help import flag

# Without a default, unlike that of `cbatch run`: a model is loaded only if it is named.
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Load this model too and tell how it is run: Hugging Face id (org/name[@revision]), "
        "folder, .gguf file, or gemma-3-270m.",
        rich_help_panel="Engine",
        show_default=False,
    ),
]
Operations = Annotated[
    bool,
    flag(
        "Engine",
        "--ops",
        "Count the operations of each of the model's layers in a step, before and after fusion.",
    ),
]
Json = Annotated[bool, flag("Terminal", "--json", "Print one JSON object on standard output.")]
