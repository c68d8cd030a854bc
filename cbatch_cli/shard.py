"""Which rows of an input are one job's, where several jobs share it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cbatch_cli.errors import UsageError

SLURM = "slurm"
"""In place of `i/n`: this task of the Slurm job array."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `index` of `count` of the input, dealt out in blocks of consecutive rows.

    Block b, which is also the part b of the output, belongs to the shard b mod `count`.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard must be i/n with 0 <= i < n, not {self.index}/{self.count}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def owns(self, block: int) -> bool:
        """Whether a block is in this share."""
        return block % self.count == self.index

    def blocks(self, last: int) -> range:
        """The blocks of this share up to and including `last`."""
        return range(self.index, last + 1, self.count)

    def num_rows(self, num_input_rows: int, rows_per_block: int) -> int:
        """How many of the first `num_input_rows` rows are in this share."""
        rounds, rest = divmod(num_input_rows, rows_per_block * self.count)
        rest -= self.index * rows_per_block
        return rounds * rows_per_block + min(max(rest, 0), rows_per_block)


WHOLE = Shard()
"""All of the input."""


def parse_shard(text: str) -> Shard:
    """The share that `i/n` names. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise ValueError(f"shard must be i/n with 0 <= i < n, or {SLURM}, not {text!r}")
    return Shard(int(match[1]), int(match[2]))


def resolve_shard(text: str | None, environment: Mapping[str, str]) -> Shard | None:
    """The share that `--shard` asks for; None where it is not given.

    Raises `UsageError` for `slurm` outside of a job array, or in one whose task ids have gaps.
    """
    if text is None:
        return None
    return _slurm_shard(environment) if text == SLURM else parse_shard(text)


def _slurm_shard(environment: Mapping[str, str]) -> Shard:
    names = ("ID", "MIN", "MAX", "COUNT")
    texts = [environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names]
    if not all(text.isdecimal() for text in texts):
        raise UsageError(
            "--shard slurm needs the variables of a Slurm job array, SLURM_ARRAY_TASK_ID, _MIN, "
            "_MAX and _COUNT; elsewhere name the share, as --shard 0/4"
        )
    task, first, last, count = map(int, texts)
    # Ids may start anywhere and have a step; a list with gaps of its own says nothing of order.
    step = (last - first) // max(count - 1, 1) or 1
    if first + step * (count - 1) != last or (task - first) % step or not first <= task <= last:
        raise UsageError(
            f"--shard slurm needs task ids at equal distances, not {count} from {first} to {last}; "
            "name the share, as --shard 0/4"
        )
    return Shard((task - first) // step, count)
