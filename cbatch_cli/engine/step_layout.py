"""Where the tokens of a step lie, in the pack and in the KV cache. Arrays on the host; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbatch_cli.engine.step import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLayout:
    """The packed tokens of n sequences, T tokens in all, over G KV groups."""

    slots: NDArray[np.int64]
    """`[n]`: the runner's row of each sequence."""
    query_lens: NDArray[np.int64]
    """`[n]`: tokens that each sequence computes; those with one come first."""
    seq_lens: NDArray[np.int64]
    """`[n]`: positions computed once the step is done."""
    query_start_loc: NDArray[np.int32]
    """`[n + 1]`: where each sequence's tokens start in the pack."""
    positions: NDArray[np.int64]
    """`[T]`: the place of each token in its sequence."""
    slot_mapping: NDArray[np.int64]
    """`[G, T]`: block * block_size + offset."""
    samples: NDArray[np.bool_]
    """`[n]`: whether a sequence samples after its last token."""

    @property
    def sample_indices(self) -> NDArray[np.int64]:
        """Of each sequence that samples, its last token's place in the pack."""
        return self.query_start_loc[1:][self.samples].astype(np.int64) - 1

    @property
    def num_decodes(self) -> int:
        """Sequences with one token."""
        return int(np.count_nonzero(self.query_lens == 1))

    @property
    def max_query_len(self) -> int:
        """The most tokens that one sequence computes."""
        return int(self.query_lens.max())

    @property
    def max_seq_len(self) -> int:
        """The length of the longest sequence."""
        return int(self.seq_lens.max())


def lay_out(
    scheduled: Sequence[ScheduledSequence], block_tables: NDArray[np.int32], block_size: int
) -> StepLayout:
    """The layout of a step over block tables `[G, num_slots, max_blocks]`."""
    num_seqs = len(scheduled)
    slots = np.array([s.slot for s in scheduled], dtype=np.int64)
    starts = np.array([s.start for s in scheduled], dtype=np.int64)
    query_lens = np.array([s.num_tokens for s in scheduled], dtype=np.int64)
    query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])

    owner = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(len(owner)) - (query_start_loc[:-1] - starts)[owner]
    block_index, offset = np.divmod(positions, block_size)
    slot_mapping = block_tables[:, slots[owner], block_index].astype(np.int64)
    return StepLayout(
        slots=slots,
        query_lens=query_lens,
        seq_lens=starts + query_lens,
        query_start_loc=query_start_loc,
        positions=positions,
        slot_mapping=slot_mapping * block_size + offset,
        samples=np.array([s.samples for s in scheduled], dtype=np.bool_),
    )


def packed_token_ids(scheduled: Sequence[ScheduledSequence]) -> NDArray[np.int64]:
    """Packed ids `[T]`.

    An id that a step in flight still samples is given as ~slot, which is below 0.
    """
    token_ids: list[int] = []
    for sequence in scheduled:
        token_ids += sequence.token_ids
        if len(sequence.token_ids) < sequence.num_tokens:
            token_ids.append(~sequence.slot)
    return np.array(token_ids, dtype=np.int64)


def new_table_entries(
    step: SchedulerOutput, table_shape: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """What a step adds to block tables of shape `[G, num_slots, max_blocks]`.

    Returns places in the flattened tables and the block ids that belong there.
    """
    _, num_slots, max_blocks = table_shape
    places: list[int] = []
    block_ids: list[int] = []
    for scheduled in step.scheduled:
        for group, new in enumerate(scheduled.new_blocks):
            if new.block_ids:
                first = (group * num_slots + scheduled.slot) * max_blocks + new.first
                places += range(first, first + len(new.block_ids))
                block_ids += new.block_ids
    return np.array(places, dtype=np.int64), np.array(block_ids, dtype=np.int32)
