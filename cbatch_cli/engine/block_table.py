"""The blocks that one sequence holds in one KV group. No torch here."""

from __future__ import annotations

from cbatch_cli.engine.step import NewBlocks

_NOTHING_NEW = NewBlocks(first=0, block_ids=())


class BlockTable:
    """A run of blocks; block `i` of a sequence holds its positions from `i * block_size` on.

    A group whose layers see a window gives up the blocks at the front as the window passes them.
    """

    __slots__ = ("_num_sent", "block_ids", "first")

    def __init__(self) -> None:
        self.first = 0
        """Index of the first block held."""
        self.block_ids: list[int] = []
        self._num_sent = 0
        """Blocks from index 0 on that the runner has been told of, or never needs to be."""

    @property
    def end(self) -> int:
        """Index after the last block held."""
        return self.first + len(self.block_ids)

    def start(self, first: int, block_ids: list[int]) -> None:
        """Hold these blocks and no other, the first of them at index `first`."""
        self.first = self._num_sent = first
        self.block_ids = block_ids

    def drop_before(self, first: int) -> list[int]:
        """Give up the blocks before index `first`; returns them in order."""
        count = max(0, first - self.first)
        dropped = self.block_ids[:count]
        del self.block_ids[:count]
        self.first += len(dropped)
        return dropped

    def clear(self) -> list[int]:
        """Give up all blocks; returns them in order."""
        block_ids = self.block_ids
        self.start(0, [])
        return block_ids

    def take_unsent(self) -> NewBlocks:
        """The blocks added since the last call, each handed out here once."""
        sent, end = self._num_sent, self.first + len(self.block_ids)
        if sent == end:
            return _NOTHING_NEW
        self._num_sent = end
        return NewBlocks(first=sent, block_ids=tuple(self.block_ids[sent - self.first :]))
