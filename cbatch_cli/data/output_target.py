"""Where the answers go: what `-o` means, and whether that place is free."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cbatch_cli.data import durable_io
from cbatch_cli.errors import UsageError
from cbatch_cli.shard import Shard

STDIN = "-"
PART_NAME = re.compile(r"part-[a-z]?(\d{5,})\.parquet")
INPUT_SUFFIX = re.compile(
    r"(\.(jsonl|ndjson|json|csv|tsv|txt|parquet))?(\.(gz|gzip|zst|zstd|bz2|xz))?$", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTarget:
    """The file or the folder that will hold the answers, and the work directory beside it."""

    path: Path
    is_directory: bool

    @property
    def work_dir(self) -> Path:
        """Sibling of the target for everything that is not an answer; on the same file system."""
        return self.path.with_name(self.path.name + ".cbatch")

    def work_path(self, name: str) -> Path:
        """A file in the work directory."""
        return self.work_dir / name

    def part_path(self, number: int) -> Path:
        """The final place of a part: in the target if that is a folder, else in the work dir."""
        folder = self.path if self.is_directory else self.work_dir
        return folder / part_name(number)

    def of_shard(self, shard: Shard) -> OutputTarget:
        """Where a share of the answers goes before the shares are merged."""
        path = shard_path(self.path, shard, has_suffix=not self.is_directory)
        return OutputTarget(path=path, is_directory=self.is_directory)

    def files(self) -> list[Path]:
        """The files that hold the answers, in row order. Raises `OutputError`."""
        if not self.is_directory:
            return [self.path]
        names = durable_io.list_dir(self.path)
        return [self.path / name for name in names if PART_NAME.fullmatch(name)]

    @staticmethod
    def part_number(name: str) -> int | None:
        """The number of the part with this file name; None for any other name."""
        match = PART_NAME.fullmatch(name)
        return None if match is None else int(match[1])

    def prepare(self, *, overwrite: bool) -> None:
        """Make sure that the target can be written; to be called under the work dir's lock.

        A folder is created. Answers that are there are left alone. Raises `UsageError` naming
        the ways out, and `OutputError`.
        """
        if self.is_directory:
            self._prepare_directory(overwrite=overwrite)
        elif os.path.lexists(self.path) and not overwrite:
            raise UsageError(_already_there(self.path))

    def clear(self) -> None:
        """Remove the parts from a folder; a file stays whole until the new one replaces it."""
        if not self.is_directory:
            return
        for name in durable_io.list_dir(self.path):
            if PART_NAME.fullmatch(name):
                durable_io.unlink(self.path / name)
        durable_io.fsync_dir(self.path)

    def _prepare_directory(self, *, overwrite: bool) -> None:
        durable_io.make_dir(self.path)
        names = durable_io.list_dir(self.path)
        foreign = [name for name in names if not PART_NAME.fullmatch(name)]
        if foreign:
            raise UsageError(
                f"{self.path} holds {foreign[0]!r}, which is no part of an output, and readers of "
                "Parquet folders stumble over other files; choose a folder of its own with -o"
            )
        if names and not overwrite:
            raise UsageError(_already_there(self.path))
        if self.path.stat().st_dev != self.work_dir.stat().st_dev:
            raise UsageError(
                f"{self.path} is on another file system than {self.work_dir}, so parts cannot be "
                f"moved into it at once; choose a folder inside it, as -o {self.path}/answers/"
            )


def part_name(number: int) -> str:
    """File name of a part; the order of names is the order of numbers, however many there are."""
    digits = f"{number:05d}"
    # A letter that grows with the number of digits keeps part-a100000 behind part-99999.
    letter = "" if len(digits) == 5 else chr(ord("a") + len(digits) - 6)
    return f"part-{letter}{digits}.parquet"


def shard_path(path: Path, shard: Shard, *, has_suffix: bool) -> Path:
    """The sibling of `path` for a share: `out.shard-00000-of-00004.parquet`."""
    stem, suffix = (path.stem, path.suffix) if has_suffix else (path.name, "")
    return path.with_name(f"{stem}.shard-{shard.index:05d}-of-{shard.count:05d}{suffix}")


def resolve_target(
    output: str | None, inputs: Sequence[str], shard: Shard | None = None
) -> OutputTarget:
    """The target that `-o` names, or the default one for `inputs`; looks at no content.

    With a `shard`, the target of that share. Raises `UsageError` for a name that is neither, and
    for a target that is among the inputs.
    """
    text = _default_output(inputs) if output is None else output
    target = _parse_target(text, f"-o {text}")
    if target is None:
        raise UsageError(
            f"-o {text} names neither a .parquet file nor a folder; "
            f"use -o {text}.parquet, or -o {text}/ for a folder of parts"
        )
    if shard is not None:
        target = target.of_shard(shard)
    for name in inputs:
        _check_is_no_input(target.path, name, is_directory=target.is_directory)
    return target


def named_target(text: str) -> OutputTarget:
    """The output of a run that is the argument of a command; it need not be there.

    Raises `UsageError` for a name that no output has.
    """
    target = _parse_target(text, text)
    if target is None:
        raise UsageError(
            f"{text} names neither a .parquet file nor a folder, so it is no output of a run; "
            "name what -o named, or the file that cbatch run wrote"
        )
    return target


def _parse_target(text: str, shown: str) -> OutputTarget | None:
    """The target with this name; None for one that is neither a Parquet file nor a folder."""
    path = Path(text)
    is_directory = text.endswith("/") or path.is_dir()
    if path.name in ("", ".."):
        path = path.resolve()
    if not path.name:
        raise UsageError(f"{shown} cannot be an output; choose a folder of its own")
    if not is_directory and path.suffix.lower() != ".parquet":
        return None
    if is_directory and path.exists() and not path.is_dir():
        raise UsageError(f"{shown} ends in a slash, but {path} is a file")
    return OutputTarget(path=path, is_directory=is_directory)


def _check_is_no_input(path: Path, name: str, *, is_directory: bool) -> None:
    target, source = path.resolve(), Path(name).resolve()
    if target == source or (is_directory and target in source.parents):
        raise UsageError(f"the output {path} would replace the input {name}; choose another -o")
    if source.is_dir() and source in target.parents:
        raise UsageError(
            f"the output {path} lies in the input folder {name}, so another run would take it for "
            "an input; choose another -o"
        )


def _default_output(inputs: Sequence[str]) -> str:
    first = inputs[0]
    if first == STDIN:
        raise UsageError("standard input has no name to derive an output from; name one with -o")
    # Of a pattern the folder that is searched, as in `data` for data/*.jsonl.
    while glob.has_magic(first):
        first = os.path.dirname(first)
    name = Path(first).resolve().name
    stem = INPUT_SUFFIX.sub("", name)
    if not stem:
        raise UsageError(f"no output name can be derived from {inputs[0]!r}; name one with -o")
    return f"{stem}.results.parquet"


def _already_there(path: Path) -> str:
    return f"{path} exists already; choose another place with -o, or replace it with --overwrite"
