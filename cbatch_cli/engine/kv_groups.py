"""Which layers share a block table, and how all groups come to have blocks of one size.

A layer with a sliding window needs no keys from before it, so layers are grouped by their window
and each group lets go of blocks when it may. All groups draw on one pool: a block has room for the
same number of layers in each, so a kind with many layers is divided into several groups. The idea
is that of vLLM's hybrid KV cache manager. No torch at run time.
"""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbatch_cli.attention.metadata import LayerSpec

_MAX_NUM_GROUPS = 8
"""More block tables than this cost the scheduler more than an unfilled place for a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroups:
    """Attention layers by KV group."""

    layers: tuple[LayerSpec, ...]
    """As they were given, each with its group."""
    windows: tuple[int | None, ...]
    """Of each group: positions that a token sees, itself included; None sees all before it."""

    @property
    def places(self) -> tuple[tuple[LayerSpec, ...], ...]:
        """The layers that share a tensor: the first of every group, the second, and so on."""
        by_group: list[list[LayerSpec]] = [[] for _ in self.windows]
        for layer in self.layers:
            by_group[layer.group].append(layer)
        num_places = max(map(len, by_group))
        return tuple(
            tuple(members[place] for members in by_group if place < len(members))
            for place in range(num_places)
        )


def group_layers(layers: Sequence[LayerSpec]) -> KVGroups:
    """Group layers by window.

    Layers of unlike shapes cannot share tensors: if the windows differ too, all layers are in one
    group that keeps everything.
    """
    by_window: dict[int | None, list[LayerSpec]] = {}
    for layer in layers:
        by_window.setdefault(layer.sliding_window, []).append(layer)
    shapes = {(layer.num_kv_heads, layer.head_dim, layer.value_head_dim) for layer in layers}
    if len(by_window) > 1 and len(shapes) > 1:
        return one_group(layers)
    size = _layers_per_group([len(alike) for alike in by_window.values()])
    windows: list[int | None] = []
    grouped = []
    for window, alike in by_window.items():
        for place, layer in enumerate(alike):
            if place % size == 0:
                windows.append(window)
            grouped.append(dataclasses.replace(layer, group=len(windows) - 1))
    grouped.sort(key=lambda layer: layer.index)
    return KVGroups(layers=tuple(grouped), windows=tuple(windows))


def one_group(layers: Sequence[LayerSpec]) -> KVGroups:
    """All layers in one group, which keeps every position."""
    return KVGroups(
        layers=tuple(dataclasses.replace(layer, group=0) for layer in layers), windows=(None,)
    )


def _layers_per_group(counts: Sequence[int]) -> int:
    """The size of the groups into which kinds with so many layers are divided.

    The one that leaves the fewest places of the last groups empty; of equals the largest.
    """
    if len(counts) == 1:
        return counts[0]

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, max(counts) + 1) if num_groups(size) <= _MAX_NUM_GROUPS]
    return min(sizes or [max(counts)], key=lambda size: (num_groups(size) * size, -size))


def window_blocks(window: int | None, block_size: int) -> int:
    """The most blocks that the positions of a window can touch; no bound for None."""
    return sys.maxsize if window is None else (window + block_size - 2) // block_size + 1


def sequence_blocks(windows: Sequence[int | None], num_tokens: int, block_size: int) -> int:
    """Blocks in all groups that a sequence needs at most to reach `num_tokens` positions.

    That is one token at a time; a step that computes n tokens needs n - 1 positions more of each
    group with a window, until it ends.
    """
    num_all = -(-num_tokens // block_size)
    return sum(min(num_all, window_blocks(window, block_size)) for window in windows)


def capacity_tokens(windows: Sequence[int | None], num_blocks: int, block_size: int) -> int:
    """Positions that one sequence can reach with the whole pool to itself; may have no bound."""

    def needed(num_full_blocks: int) -> int:
        return sequence_blocks(windows, num_full_blocks * block_size, block_size)

    if None not in windows and needed(num_blocks + 1) <= num_blocks:
        return sys.maxsize
    return (bisect_right(range(num_blocks + 1), num_blocks, key=needed) - 1) * block_size
