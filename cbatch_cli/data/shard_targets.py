"""The outputs of the shards of a job, found by their names beside the output of the whole."""

from __future__ import annotations

import re

from cbatch_cli.data import durable_io
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.shard import Shard


def find_shards(target: OutputTarget) -> dict[Shard, OutputTarget]:
    """What there is of shards, begun or done, in order. Raises `OutputError`."""
    folder = target.path.parent
    if not folder.is_dir():
        return {}
    path = target.path
    stem, suffix = (path.name, "") if target.is_directory else (path.stem, path.suffix)
    pattern = re.compile(
        rf"{re.escape(stem)}\.shard-(\d{{5,}})-of-(\d{{5,}}){re.escape(suffix)}(\.cbatch)?"
    )
    found: set[Shard] = set()
    for name in durable_io.list_dir(folder):
        match = pattern.fullmatch(name)
        if match is not None and int(match[1]) < int(match[2]):
            found.add(Shard(int(match[1]), int(match[2])))
    ordered = sorted(found, key=lambda shard: (shard.count, shard.index))
    return {shard: target.of_shard(shard) for shard in ordered}
