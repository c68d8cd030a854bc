"""The tensors behind the block ids, how many blocks memory allows, and what a sequence takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.engine.kv_groups import KVGroups, group_layers, one_group, sequence_blocks
from cbatch_cli.errors import UsageError


class KVCache:
    """Keys and values of every layer, in blocks. What was never written is not initialised.

    A machine gives out the memory of a block when it is first written, so a large pool costs
    nothing until it is used. `layers[i]` is (keys `[num_blocks, block_size, num_kv_heads,
    head_dim]`, values likewise with `value_head_dim`). Layers that have the same place in their KV
    groups share these tensors: a block belongs to one group at a time.
    """

    def __init__(
        self,
        groups: KVGroups,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        for sharing in groups.places:
            layer = sharing[0]
            shape = (num_blocks, block_size, layer.num_kv_heads)
            tensors = (
                torch.empty(*shape, layer.head_dim, dtype=dtype, device=device),
                torch.empty(*shape, layer.value_head_dim, dtype=dtype, device=device),
            )
            by_layer |= {layer.index: tensors for layer in sharing}
        self.layers = [by_layer[layer.index] for layer in groups.layers]


def block_bytes(groups: KVGroups, *, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block, in bytes: the keys and values of the layers of one group."""
    values_per_token = sum(
        layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) for layer, *_ in groups.places
    )
    return values_per_token * block_size * dtype.itemsize


def fit_num_blocks(
    *,
    memory: int,
    block_nbytes: int,
    block_size: int,
    windows: Sequence[int | None],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> int:
    """Blocks that fit into `memory` bytes, but no more than all sequences can ever fill.

    `windows` are those of the KV groups. Raises `UsageError` when not even one token fits.
    """
    num_useful = max_num_seqs * sequence_blocks(windows, max_model_len, block_size)
    # What a step computes is held in full until it has ended.
    per_group = -(-max_num_batched_tokens // block_size) + max_num_seqs
    num_useful += per_group * sum(window is not None for window in windows)
    num_blocks = min(memory // block_nbytes, num_useful)
    if num_blocks < len(windows):
        raise UsageError(
            f"{memory / 2**20:.0f} MiB for the KV cache hold no block of "
            f"{len(windows) * block_nbytes / 2**20:.1f} MiB; give more with --kv-cache-memory or "
            "use a smaller --block-size"
        )
    return num_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCost:
    """Memory that the keys and values of one sequence take, in bytes, in whole blocks."""

    context_len: int
    """Length of the sequence, in tokens."""
    num_bytes: int
    num_uniform_bytes: int
    """What they would take if every layer kept every position."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes for each token of the sequence, on average."""
        return self.num_bytes / self.context_len

    @property
    def uniform_bytes_per_token(self) -> float:
        """The same if every layer kept every position."""
        return self.num_uniform_bytes / self.context_len

    @property
    def share_of_uniform(self) -> float:
        """How much of the memory is left by keeping windows only, 0..1 but for rounding."""
        return self.num_bytes / self.num_uniform_bytes


def kv_cost(
    layers: Sequence[LayerSpec], *, context_len: int, block_size: int, dtype: torch.dtype
) -> KVCost:
    """What a sequence of `context_len` tokens, of which the last is being decoded, takes.

    `layers` are a model's as recorded, `dtype` that of the cache. Layers with a sliding window
    keep the blocks that it touches at worst. Raises `ValueError` for a length or a block size
    below 1.
    """
    for name, value in (("context_len", context_len), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, not at least 1")

    def num_bytes(groups: KVGroups) -> int:
        num_blocks = sequence_blocks(groups.windows, context_len, block_size)
        return num_blocks * block_bytes(groups, block_size=block_size, dtype=dtype)

    return KVCost(
        context_len=context_len,
        num_bytes=num_bytes(group_layers(layers)),
        num_uniform_bytes=num_bytes(one_group(layers)),
    )
