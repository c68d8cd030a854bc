from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cbatch_cli.engine.block_allocator import BlockAllocator

NUM_BLOCKS = 7


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside a model that keeps every owner's table and every block's content."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    def _used(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        num_free = NUM_BLOCKS - len(self._used())
        if count > num_free:
            with pytest.raises(ValueError, match="free"):
                self.allocator.allocate(count)
            return
        block_ids = self.allocator.allocate(count)
        assert len(set(block_ids)) == count and not set(block_ids) & set(self._used())
        for block_id in block_ids:
            self.content.pop(block_id, None)
        self.tables.append(block_ids)

    @rule(block_hash=st.binary(min_size=1, max_size=1), data=st.data())
    def register(self, block_hash: bytes, data: st.DataObject) -> None:
        used = sorted(self._used())
        if used:
            block_id = data.draw(st.sampled_from(used))
            self.allocator.register(block_id, block_hash)
            if block_hash not in self.content.values() and block_id not in self.content:
                self.content[block_id] = block_hash

    @rule(block_hash=st.binary(min_size=1, max_size=1))
    def share(self, block_hash: bytes) -> None:
        block_id = self.allocator.lookup(block_hash)
        expected = [b for b, h in self.content.items() if h == block_hash]
        assert ([] if block_id is None else [block_id]) == expected
        if block_id is not None:
            self.allocator.share([block_id])
            self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.free(table)

    @rule()
    def forget_all(self) -> None:
        self.allocator.forget_all()
        self.content.clear()

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check_integrity(self.tables)
        assert self.allocator.num_free == NUM_BLOCKS - len(self._used())


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_uncached_blocks_are_handed_out_before_cached_ones() -> None:
    allocator = BlockAllocator(3)
    first, second, third = allocator.allocate(3)
    allocator.register(first, b"a")
    allocator.register(second, b"b")
    allocator.free([first, second, third])
    assert allocator.allocate(1) == [third]
    # Of a cached prefix the end goes first.
    assert allocator.allocate(1) == [second]
    assert allocator.lookup(b"a") == first and allocator.lookup(b"b") is None


def test_freeing_twice_is_refused() -> None:
    allocator = BlockAllocator(1)
    table = allocator.allocate(1)
    allocator.free(table)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(table)


def test_check_integrity_sees_a_lost_owner() -> None:
    allocator = BlockAllocator(2)
    table = allocator.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        allocator.check_integrity([table, table])
