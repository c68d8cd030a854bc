"""Books of the paged KV cache: which block is free, shared, or remembered by its content.

A block is *used* while somebody owns it (reference count above 0) and *free* otherwise. A free
block may still be *cached*: its content is known by hash and can be taken up again until the block
is handed out for something else, least recently freed first. No torch here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockAllocator:
    """Hands out block ids 0..num_blocks-1 and counts their owners."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Free block ids in the order in which they will be handed out."""
        self._hash_by_block: dict[int, bytes] = {}
        self._block_by_hash: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def is_free(self, block_id: int) -> bool:
        """Whether nobody owns the block."""
        return self._ref_counts[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each. Raises `ValueError` if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block, taking it off the free list where it was free."""
        for block_id in block_ids:
            if self.is_free(block_id):
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one owner off each block of a sequence's table, given in table order.

        Blocks that hold nothing known are handed out again first; of the known ones the end of a
        prefix goes before its beginning, which more sequences can share.
        """
        for block_id in reversed(block_ids):
            if self.is_free(block_id):
                raise ValueError(f"block {block_id} is free already")
            self._ref_counts[block_id] -= 1
            if self.is_free(block_id):
                self._free[block_id] = None
                if block_id not in self._hash_by_block:
                    self._free.move_to_end(block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds the content with this hash, free or used."""
        return self._block_by_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Remember the content of a used block; the first block of equal ones is kept."""
        if block_hash not in self._block_by_hash and block_id not in self._hash_by_block:
            self._block_by_hash[block_hash] = block_id
            self._hash_by_block[block_id] = block_hash

    def forget_all(self) -> None:
        """Drop all knowledge of contents, as after a step that failed half way."""
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the books balance with the block tables of all owners."""
        owners = Counter(block_id for table in tables for block_id in table)
        counted = {i: count for i, count in enumerate(self._ref_counts) if count}
        assert counted == dict(owners), f"reference counts {counted} != owners {dict(owners)}"
        free = set(self._free)
        assert free == set(range(self.num_blocks)) - set(owners), "free list and owners overlap"
        assert self.num_free + self.num_used == self.num_blocks
        inverse = {block_id: h for h, block_id in self._block_by_hash.items()}
        assert inverse == self._hash_by_block, "hash maps are not inverse to each other"
