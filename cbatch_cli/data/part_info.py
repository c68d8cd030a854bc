"""What a finished part says of itself, so that a resumed run can leave its rows alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.data import durable_io
from cbatch_cli.data.output_target import OutputTarget
from cbatch_cli.data.row import InputPosition

PART_KEY = "cbatch.part"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """Which rows a part holds, and what they were."""

    rows: range
    rows_hash: str
    """Hash of the content hashes of its input rows, in order."""
    end: InputPosition | None
    """Where the input goes on behind its last row."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Its failed rows, counted by error type."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "first_row": self.rows.start,
            "num_rows": len(self.rows),
            "rows_hash": self.rows_hash,
            # As a list: what is not a plain tuple is a str(...) in our JSON.
            "end": None if self.end is None else list(self.end),
            "errors": dict(self.errors),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PartInfo:
        """The reverse of `to_dict`. Raises `KeyError` or `TypeError` for anything else."""
        first_row = values["first_row"]
        end = values["end"]
        return cls(
            rows=range(first_row, first_row + values["num_rows"]),
            rows_hash=values["rows_hash"],
            end=None if end is None else InputPosition(*end),
            errors=Counter(values["errors"]),
        )


class RowsHash:
    """Hash of a sequence of rows, which are given by their content hashes in order."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16)
        self.num_rows = 0

    def add(self, content_hash: bytes) -> None:
        """Take the next row."""
        self._digest.update(content_hash)
        self.num_rows += 1

    def hexdigest(self) -> str:
        """The hash of the rows so far."""
        return self._digest.hexdigest()


def find_parts(target: OutputTarget) -> dict[int, PartInfo]:
    """The whole parts that earlier runs of the job have left, by number.

    One that cannot be read, or does not hold the rows that it says, is not among them: its rows
    are run again. Raises `OutputError` if the folder cannot be listed.
    """
    folder = target.part_path(0).parent
    parts: dict[int, PartInfo] = {}
    for name in durable_io.list_dir(folder) if folder.is_dir() else []:
        number = target.part_number(name)
        if number is not None and (info := read_part_info(folder / name)) is not None:
            parts[number] = info
    return parts


def read_part_info(path: Path) -> PartInfo | None:
    """What the part says of itself; None if it is damaged, for which all of it is read."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            notes = file.metadata.metadata or {}
            info = PartInfo.from_dict(json.loads(notes[PART_KEY.encode()]))
            row_groups = range(file.num_row_groups)
            num_rows = sum(file.read_row_group(index).num_rows for index in row_groups)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    return info if num_rows == len(info.rows) else None
