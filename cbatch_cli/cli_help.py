"""How options are declared, and the help page that groups them under headings."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import typer
from typer.core import TyperCommand

from cbatch_cli.config import EngineConfig, JobConfig

_DEFAULTS = {
    field.name: field.default
    for config in (JobConfig, EngineConfig)
    for field in dataclasses.fields(config)
    if field.default is not dataclasses.MISSING
}
_SECTIONS = ("Benchmark", "Input", "Prompts", "Sampling", "Engine", "Output", "Terminal")


class SectionedCommand(TyperCommand):
    """A command whose plain help lists its options under headings, without loading rich."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; an error in them names the command, which its parser does not."""
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name on the usage line."""
        arguments = (p for p in self.get_params(ctx) if p.param_type_name == "argument")
        return [*(_argument_text(argument) for argument in arguments), "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write every option under the heading that it was declared with."""
        records: dict[str, list[tuple[str, str]]] = {section: [] for section in _SECTIONS}
        for parameter in self.get_params(ctx):
            section = getattr(parameter, "rich_help_panel", None) or "Terminal"
            if parameter.param_type_name == "argument":
                records[section].append((_argument_text(parameter), getattr(parameter, "help", "")))
            elif record := parameter.get_help_record(ctx):
                records[section].append(record)
        for section, lines in records.items():
            if lines:
                with formatter.section(section):
                    formatter.write_dl(lines, col_max=34)


def _argument_text(argument: Any) -> str:
    """An argument on a help page."""
    return argument.metavar if argument.nargs == 1 else f"{argument.metavar}..."


def option(
    section: str, flags: str, metavar: str | None, help: str, *, with_default: bool = True
) -> Any:
    """A typer option under the heading `section`; `flags` are separated by spaces.

    The help ends with the default of the setting that the first flag names, if it has one, unless
    without the option something else than this is done.
    """
    names = flags.split()
    default = _DEFAULTS.get(names[0].removeprefix("--").replace("-", "_"))
    if with_default and default is not None and default is not False:
        in_mib = isinstance(default, int) and default >= 2**20
        help += f" [default: {f'{default // 2**20}MiB' if in_mib else default}]"
    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=section, show_default=False
    )


def flag(section: str, flags: str, help: str) -> Any:
    """A typer option that takes no value."""
    return option(section, flags, None, help)


def choices(literal: Any) -> str:
    """The values of a `Literal` as a help page shows them."""
    return "|".join(get_args(literal))
