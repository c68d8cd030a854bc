"""Which KV blocks each sequence holds, group by group, and which prefixes are shared.

A KV group is a set of layers with one block table; all its layers cache the same positions.
No torch here: the tensors behind the block ids are `kv_cache`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from cbatch_cli.engine.block_allocator import BlockAllocator
from cbatch_cli.engine.sequence import Sequence


class KVBlocks:
    """Block tables of all sequences over one `BlockAllocator` a KV group.

    `salt` separates prefixes whose content depends on more than token ids.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        prefix_caching: bool = True,
        salt: bytes = b"",
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.allocators = [BlockAllocator(num_blocks) for _ in range(num_groups)]
        self._root = blake2b(salt, digest_size=16).digest()

    @property
    def capacity_tokens(self) -> int:
        """Token positions that one sequence can hold when it is alone."""
        return min(a.num_blocks for a in self.allocators) * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0..1."""
        return max(a.num_used / a.num_blocks for a in self.allocators)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, *, reserve: int) -> bool:
        """Give a new sequence blocks for all its tokens, sharing cached ones, or change nothing.

        Of the prompt at least one token stays to be computed, since its logits are needed.
        `reserve` blocks must be left over for the growth of running sequences.
        """
        hits = self._cached_prefix(sequence)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(hits[0])
        for allocator, block_ids in zip(self.allocators, hits, strict=True):
            num_revived = sum(map(allocator.is_free, block_ids))
            if num_new + num_revived + reserve > allocator.num_free:
                return False
        for allocator, block_ids, table in zip(
            self.allocators, hits, sequence.block_tables, strict=True
        ):
            allocator.share(block_ids)
            table[:] = block_ids + allocator.allocate(num_new)
        sequence.num_computed_tokens = len(hits[0]) * self.block_size
        sequence.num_registered_blocks = len(hits[0])
        sequence.num_sent_blocks = 0
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Add the blocks that a running sequence's tokens need, or change nothing."""
        num_missing = self.num_blocks_for(sequence.num_tokens) - len(sequence.block_tables[0])
        if num_missing <= 0:
            return True
        if any(num_missing > allocator.num_free for allocator in self.allocators):
            return False
        for allocator, table in zip(self.allocators, sequence.block_tables, strict=True):
            table += allocator.allocate(num_missing)
        return True

    def release(self, sequence: Sequence) -> None:
        """Give up all blocks of a sequence."""
        for allocator, table in zip(self.allocators, sequence.block_tables, strict=True):
            allocator.free(table)
            table.clear()
        sequence.num_registered_blocks = 0

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
        for index in range(sequence.num_registered_blocks, num_full):
            for allocator, table in zip(self.allocators, sequence.block_tables, strict=True):
                allocator.register(table[index], sequence.block_hashes[index])
        sequence.num_registered_blocks = num_full

    def forget_all(self) -> None:
        """Share nothing that was computed before now."""
        for allocator in self.allocators:
            allocator.forget_all()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `AssertionError` unless every group's books balance with these sequences."""
        sequences = list(sequences)
        for group, allocator in enumerate(self.allocators):
            allocator.check_integrity(s.block_tables[group] for s in sequences)

    def _cached_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Blocks, group by group, that hold the longest cached prefix."""
        hits: list[list[int]] = [[] for _ in self.allocators]
        if not self.prefix_caching:
            return hits
        num_usable = (len(sequence.token_ids) - 1) // self.block_size
        self._extend_hashes(sequence, num_usable)
        for block_hash in sequence.block_hashes[:num_usable]:
            block_ids = [allocator.lookup(block_hash) for allocator in self.allocators]
            if any(block_id is None for block_id in block_ids):
                break
            for hit, block_id in zip(hits, block_ids, strict=True):
                hit.append(block_id)  # type: ignore[arg-type]
        return hits

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Chain the hashes of full blocks: equal hashes mean equal tokens from the start on."""
        hashes = sequence.block_hashes
        for index in range(len(hashes), num_blocks):
            start = index * self.block_size
            token_ids = sequence.token_ids[start : start + self.block_size]
            parent = hashes[-1] if hashes else self._root
            content = np.asarray(token_ids, dtype=np.int64).tobytes()
            hashes.append(blake2b(content, key=parent, digest_size=16).digest())
