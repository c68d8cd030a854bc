"""What one forward pass tells the attention layers. Tensors only: no request is known here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

LayerKind = Literal["full", "window", "state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Shape of one attention layer, recorded from a real forward pass, not read from a config."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Dimension of queries and keys."""
    value_head_dim: int
    sliding_window: int | None = None
    """How many positions a token sees, itself included; None sees all before it."""
    kind: LayerKind = "full"
    group: int = 0
    """Index of the KV group, whose layers share block tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVScales:
    """What keys and values are divided by before a cache of eight bits rounds them."""

    k: float = 1.0
    v: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Layout of the packed tokens of one step for one KV group.

    Sequences are ordered decodes first: the first `num_decodes` sequences have one query token.
    """

    query_start_loc: Tensor
    """int32 `[num_seqs + 1]`: where each sequence's tokens start in the pack."""
    seq_lens: Tensor
    """int32 `[num_seqs]`: positions computed once this step is done."""
    block_tables: Tensor
    """int32 `[num_seqs, max_blocks]`."""
    slot_mapping: Tensor
    """int64 `[num_tokens]`: block * block_size + offset for every token's K and V; -1 skips."""
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_lens_cpu: tuple[int, ...]
    """Host copies: the CPU backend loops over sequences without touching tensors."""
    seq_lens_cpu: tuple[int, ...]


def metadata_of_groups(
    *, block_tables: Tensor, slot_mapping: Tensor, **shared: Any
) -> list[AttentionMetadata]:
    """One entry per KV group, of block tables `[G, num_seqs, max_blocks]` and slots `[G, T]`.

    `shared` are the fields of `AttentionMetadata` that are the same for all groups.
    """
    return [
        AttentionMetadata(block_tables=tables, slot_mapping=slots, **shared)
        for tables, slots in zip(block_tables.unbind(), slot_mapping.unbind(), strict=True)
    ]
