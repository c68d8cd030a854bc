"""Single steps of a loaded model over a small KV cache of their own, to check or to watch it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec
from cbatch_cli.models.hf_model import HFModel


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """What a layer passes to its attention beside queries, keys and values."""

    scale: float
    softcap: float | None
    sinks: Tensor | None


class NotingBackend:
    """An attention backend that keeps what each layer passes to it."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.calls: dict[int, AttentionCall] = {}
        """By the index of the attention layer."""

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """As the backend does."""
        self._backend.begin_step(metadata)

    def forward(
        self,
        layer: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As the backend does."""
        self.calls[layer.index] = AttentionCall(scale=scale, softcap=softcap, sinks=sinks)
        return self._backend.forward(
            layer, query, key, value, scale=scale, softcap=softcap, sinks=sinks
        )


def layer_caches(
    model: HFModel, *, num_blocks: int, block_size: int, value: float
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[num_blocks, block_size, num_kv_heads, head_dim]` of each layer, filled."""

    def filled(spec: LayerSpec, head_dim: int) -> Tensor:
        shape = (num_blocks, block_size, spec.num_kv_heads, head_dim)
        return torch.full(shape, value, dtype=model.dtype, device=model.device)

    return [
        (filled(spec, spec.head_dim), filled(spec, spec.value_head_dim))
        for spec in model.layer_specs
    ]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each of some runs in a row begins, and where the last one ends."""
    return [0, *itertools.accumulate(lengths)]


def step_metadata(
    parts: Sequence[tuple[int, Tensor]], tables: Tensor, block_size: int, device: torch.device
) -> AttentionMetadata:
    """The layout of a step that computes, of each (row, positions), these consecutive positions.

    `tables` are the int32 block tables `[num_rows, max_blocks]`. Rows of a single position come
    first.
    """
    query_lens = tuple(len(positions) for _, positions in parts)
    seq_lens = tuple(int(positions[-1]) + 1 for _, positions in parts)
    slots = [
        tables[row, positions // block_size].long() * block_size + positions % block_size
        for row, positions in parts
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts_of(query_lens), dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables[[row for row, _ in parts]].to(device),
        slot_mapping=torch.cat(slots).to(device),
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
    )


def first_step_metadata(
    lengths: Sequence[int], block_size: int, device: torch.device
) -> AttentionMetadata:
    """The layout of a step that computes rows from their start, each in a block of its own."""
    tables = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    parts = [(row, torch.arange(length)) for row, length in enumerate(lengths)]
    return step_metadata(parts, tables, block_size, device)
