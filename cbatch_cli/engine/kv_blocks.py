"""Which KV blocks each sequence holds, group by group, and which prefixes are shared.

A KV group is a set of layers with one block table. A group that sees everything holds blocks for
all tokens of a running sequence from its admission on. A group that sees a window holds those
between the oldest position that a query of a step in flight, or a later one, can see and the last
position that is computed next. All groups draw on one pool. No torch here: the tensors behind the
block ids are `kv_cache`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from cbatch_cli.engine.block_allocator import BlockAllocator
from cbatch_cli.engine.kv_groups import capacity_tokens, window_blocks
from cbatch_cli.engine.sequence import Sequence, SequenceStatus
from cbatch_cli.engine.step import NewBlocks


class KVBlocks:
    """Block tables of all sequences over one `BlockAllocator`.

    `windows` says of each KV group how many positions a token sees, itself included; None is all.
    `salt` separates prefixes whose content depends on more than token ids.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        salt: bytes = b"",
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.prefix_caching = prefix_caching
        self.allocator = BlockAllocator(num_blocks)
        self.capacity_tokens = capacity_tokens(self.windows, num_blocks, block_size)
        """Token positions that one sequence can reach when it is alone."""
        self._window_groups = [
            (group, window) for group, window in enumerate(self.windows) if window is not None
        ]
        self._root = blake2b(salt, digest_size=16).digest()

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return self.allocator.num_used / self.allocator.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, *, reserve: int) -> bool:
        """Give a new sequence blocks to begin with, sharing cached ones, or change nothing.

        Of the prompt at least one token stays to be computed, since its logits are needed.
        `reserve` blocks must be left over, and those that the windows of this sequence will fill.
        """
        allocator = self.allocator
        num_hit = self._num_cached_blocks(sequence)
        num_cached_tokens = num_hit * self.block_size
        num_all = self.num_blocks_for(sequence.num_tokens)
        num_needed = reserve
        hits = []
        for group, window in enumerate(self.windows):
            first = self._num_passed(window, num_cached_tokens)
            block_ids = [
                self._cached(group, block_hash)
                for block_hash in sequence.block_hashes[first:num_hit]
            ]
            hits.append((first, block_ids))
            num_needed += sum(map(allocator.is_free, block_ids))
            num_needed += min(num_all, first + self._span(window)) - num_hit
        if num_needed > allocator.num_free:
            return False
        for table, (first, block_ids) in zip(sequence.block_tables, hits, strict=True):
            allocator.share(block_ids)
            table.start(first, block_ids)
        self._note_tables(sequence)
        sequence.num_computed_tokens = sequence.num_settled_tokens = num_cached_tokens
        sequence.num_registered_blocks = num_hit
        return self.grow(sequence)

    def headroom(self, sequence: Sequence) -> int:
        """Blocks to leave free for a running sequence: its windows filled, and one more a group."""
        num_all = self.num_blocks_for(sequence.num_tokens)
        num_missing = len(self.windows)
        for group, window in self._window_groups:
            table = sequence.block_tables[group]
            num_missing += max(0, min(num_all, table.first + self._span(window)) - table.end)
        return num_missing

    def grow(self, sequence: Sequence) -> bool:
        """Add the blocks without which a sequence cannot compute one token, or change nothing."""
        if sequence.num_tokens <= sequence.num_held_tokens:
            return True  # as most do in most steps
        ends = self._needed_ends(sequence)
        num_missing = 0
        for end, table in zip(ends, sequence.block_tables, strict=True):
            num_missing += max(0, end - table.end)
        if num_missing > self.allocator.num_free:
            return False
        if num_missing:
            for end, table in zip(ends, sequence.block_tables, strict=True):
                table.block_ids += self.allocator.allocate(max(0, end - table.end))
            self._note_tables(sequence)
        return True

    def grow_windows(self, sequence: Sequence, num_tokens: int) -> None:
        """Add blocks of window groups for the next `num_tokens` tokens, as far as some are free."""
        if not self._window_groups:
            return
        # Window groups end alike: each holds blocks up to the last position computed.
        end = sequence.block_tables[self._window_groups[0][0]].end
        num_missing = self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - end
        num_new = min(num_missing, self.allocator.num_free // len(self._window_groups))
        if num_new > 0:
            for group, _ in self._window_groups:
                sequence.block_tables[group].block_ids += self.allocator.allocate(num_new)
            self._note_tables(sequence)

    def num_computable_tokens(self, sequence: Sequence) -> int:
        """Tokens for which the sequence holds blocks and which are not computed yet."""
        return min(sequence.num_tokens, sequence.num_held_tokens) - sequence.num_computed_tokens

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the sequence holds the blocks that `grow` adds."""
        return sequence.num_tokens <= sequence.num_held_tokens or all(
            end <= table.end
            for end, table in zip(self._needed_ends(sequence), sequence.block_tables, strict=True)
        )

    def take_new_blocks(self, sequence: Sequence) -> tuple[NewBlocks, ...]:
        """Per group the blocks added since the last call; nothing at all where none were."""
        if not sequence.has_new_blocks:
            return ()
        sequence.has_new_blocks = False
        return tuple(table.take_unsent() for table in sequence.block_tables)

    def release(self, sequence: Sequence) -> None:
        """Give up all blocks of a sequence."""
        for table in sequence.block_tables:
            self.allocator.free(table.clear())
        sequence.num_registered_blocks = 0
        self._note_tables(sequence)

    def release_passed(self, sequence: Sequence) -> None:
        """Give up the blocks that neither a step in flight nor a later one can see."""
        if sequence.num_settled_tokens < sequence.passes_block_at:
            return
        for group, window in self._window_groups:
            table = sequence.block_tables[group]
            first = self._num_passed(window, sequence.num_settled_tokens)
            if first > table.first:
                self.allocator.free(table.drop_before(first))
        self._note_tables(sequence)

    def num_returning(self, sequence: Sequence) -> int:
        """Blocks that `release_passed` will give up once the steps in flight have ended."""
        return sum(
            max(
                0,
                self._num_passed(window, sequence.num_computed_tokens)
                - sequence.block_tables[group].first,
            )
            for group, window in self._window_groups
        )

    def register_computed(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full once the step being scheduled has run.

        Who shares them reads them in a later step, and steps run in the order of their schedule.
        """
        if not self.prefix_caching:
            return
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = num_known // self.block_size
        if num_full <= sequence.num_registered_blocks:
            return
        self._extend_hashes(sequence, num_full)
        for group, table in enumerate(sequence.block_tables):
            # A short window may have passed a block before all its ids were known.
            for index in range(max(sequence.num_registered_blocks, table.first), num_full):
                self.allocator.register(
                    table.block_ids[index - table.first],
                    _group_hash(group, sequence.block_hashes[index]),
                )
        sequence.num_registered_blocks = num_full

    def forget_all(self) -> None:
        """Share nothing that was computed before now."""
        self.allocator.forget_all()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `AssertionError` unless the books balance with these sequences' tables.

        Of a running sequence each window group must hold what can still be seen, and no more.
        """
        sequences = list(sequences)
        tables = [table for sequence in sequences for table in sequence.block_tables]
        self.allocator.check_integrity(table.block_ids for table in tables)
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            for window, table in zip(self.windows, sequence.block_tables, strict=True):
                first = self._num_passed(window, sequence.num_settled_tokens)
                assert table.first == first, f"window {window}: {table.first} != {first}"
                assert table.end >= self.num_blocks_for(sequence.num_computed_tokens)
            held = min(table.end for table in sequence.block_tables) * self.block_size
            assert sequence.num_held_tokens == held, f"{sequence.num_held_tokens} != {held}"

    def _note_tables(self, sequence: Sequence) -> None:
        """Keep what every step asks of the tables, which change in few of them."""
        tables = sequence.block_tables
        sequence.num_held_tokens = min(table.end for table in tables) * self.block_size
        sequence.has_new_blocks = True
        sequence.passes_block_at = min(
            (
                (tables[group].first + 1) * self.block_size + window - 1
                for group, window in self._window_groups
            ),
            default=sys.maxsize,
        )

    def _needed_ends(self, sequence: Sequence) -> list[int]:
        """Per group the index after the last block without which no token can be computed."""
        num_next = min(sequence.num_computed_tokens + 1, sequence.num_tokens)
        full_end = self.num_blocks_for(sequence.num_tokens)
        window_end = self.num_blocks_for(num_next)
        return [full_end if window is None else window_end for window in self.windows]

    def _num_passed(self, window: int | None, position: int) -> int:
        """Blocks at the front that a query at `position`, and so any after it, does not see."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _span(self, window: int | None) -> int:
        return window_blocks(window, self.block_size)

    def _num_cached_blocks(self, sequence: Sequence) -> int:
        """Length in blocks of the longest prefix of which every group holds what it sees."""
        if not self.prefix_caching:
            return 0
        num_usable = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, num_usable)
        hashes = sequence.block_hashes
        end = num_usable
        for group, window in enumerate(self.windows):
            if window is None:
                misses = (i for i in range(end) if not self._is_cached(group, hashes[i]))
                end = next(misses, end)
        # Backwards from the longest candidate. A block that is missing where it is seen rules out
        # every prefix that goes beyond it, since a shorter one's window reaches further back.
        index = end - 1
        while index >= 0:
            seen = [
                group
                for group, window in self._window_groups
                if index >= self._num_passed(window, end * self.block_size)
            ]
            if not seen:
                break
            if not all(self._is_cached(group, hashes[index]) for group in seen):
                end = index
            index -= 1
        return end

    def _is_cached(self, group: int, block_hash: bytes) -> bool:
        return self.allocator.lookup(_group_hash(group, block_hash)) is not None

    def _cached(self, group: int, block_hash: bytes) -> int:
        block_id = self.allocator.lookup(_group_hash(group, block_hash))
        assert block_id is not None
        return block_id

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Chain the hashes of full blocks: equal hashes mean equal tokens from the start on."""
        hashes = sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            start = index * self.block_size
            token_ids = sequence.token_ids[start : start + self.block_size]
            parent = hashes[-1] if hashes else self._root
            content = np.asarray(token_ids, dtype=np.int64).tobytes()
            hashes.append(blake2b(content, key=parent, digest_size=16).digest())


def _group_hash(group: int, block_hash: bytes) -> bytes:
    """What a block of a group is remembered by: groups cache different layers."""
    return block_hash + group.to_bytes(2)
