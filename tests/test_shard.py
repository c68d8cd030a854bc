"""Which rows are whose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch_cli.errors import UsageError
from cbatch_cli.shard import WHOLE, Shard, parse_shard, resolve_shard

counts = st.integers(1, 9)


@given(counts, st.integers(0, 500), st.integers(1, 40))
def test_every_row_is_in_one_share(count: int, num_rows: int, rows_per_block: int) -> None:
    shards = [Shard(index, count) for index in range(count)]
    owners = [
        [shard.index for shard in shards if shard.owns(row // rows_per_block)]
        for row in range(num_rows)
    ]
    assert all(len(owner) == 1 for owner in owners)
    for shard in shards:
        assert shard.num_rows(num_rows, rows_per_block) == owners.count([shard.index])


@given(counts, st.integers(0, 60))
def test_the_blocks_of_a_share(count: int, last: int) -> None:
    for index in range(count):
        shard = Shard(index, count)
        assert list(shard.blocks(last)) == [b for b in range(last + 1) if shard.owns(b)]


def test_the_whole() -> None:
    assert all(WHOLE.owns(block) for block in range(9))
    assert WHOLE.num_rows(123, 10) == 123
    assert list(WHOLE.blocks(3)) == [0, 1, 2, 3]


def test_shares_by_name() -> None:
    assert parse_shard(" 3/4 ") == Shard(3, 4)
    assert str(Shard(3, 4)) == "3/4"
    assert resolve_shard("0/1", {}) == Shard(0, 1)


@pytest.mark.parametrize("text", ["", "1", "4/4", "1/0", "-1/2", "1/2/3", "a/b", "1.0/2", "SLURM"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ValueError, match="shard must be i/n with 0 <= i < n"):
        parse_shard(text)


def array(**values: object) -> dict[str, str]:
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (array(ID=2, MIN=0, MAX=3, COUNT=4), Shard(2, 4)),
        (array(ID=4, MIN=1, MAX=4, COUNT=4), Shard(3, 4)),
        (array(ID=25, MIN=5, MAX=35, COUNT=4, STEP=10), Shard(2, 4)),
        (array(ID=7, MIN=7, MAX=7, COUNT=1), Shard(0, 1)),
    ],
)
def test_shares_of_a_job_array(variables: dict[str, str], expected: Shard) -> None:
    assert resolve_shard("slurm", variables) == expected
    # Nothing is shared out unasked, and what is asked for goes before the variables.
    assert resolve_shard(None, variables) is None
    assert resolve_shard("1/9", variables) == Shard(1, 9)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "needs the variables of a Slurm job array"),
        (array(ID=2, MIN=0, MAX=3), "needs the variables of a Slurm job array"),
        (array(ID="x", MIN=0, MAX=3, COUNT=4), "needs the variables of a Slurm job array"),
        (array(ID=3, MIN=1, MAX=7, COUNT=3), "at equal distances, not 3 from 1 to 7"),
        (array(ID=2, MIN=1, MAX=9, COUNT=3), "at equal distances, not 3 from 1 to 9"),
        (array(ID=9, MIN=1, MAX=4, COUNT=4), "at equal distances"),
    ],
)
def test_job_arrays_that_do_not_say(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_shard("slurm", variables)
