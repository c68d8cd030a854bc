"""Packed steps of a model over paged rows, for comparison with whole rows run apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.hf_model import HFModel

BackendMaker = Callable[..., AttentionBackend]
"""Takes the layers, their caches and the block size."""


@dataclasses.dataclass
class PagedRow:
    """One row whose blocks are `first_block`, `first_block` + stride, ..."""

    token_ids: Tensor
    blocks: Tensor
    computed: int = 0
    logits: list[Tensor] = dataclasses.field(default_factory=list)


def run_step(
    model: HFModel,
    backend: AttentionBackend,
    work: list[tuple[PagedRow, int]],
    block_size: int,
) -> None:
    """Compute the next n tokens of each (row, n), in one pack, logits for all of them."""
    work = sorted(work, key=lambda entry: entry[1] != 1)
    tokens, positions, slots = [], [], []
    for row, new in work:
        position = torch.arange(row.computed, row.computed + new)
        tokens.append(row.token_ids[position])
        positions.append(position)
        slots.append(row.blocks[position // block_size] * block_size + position % block_size)
        row.computed += new
    query_lens = tuple(new for _, new in work)
    seq_lens = tuple(row.computed for row, _ in work)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.stack([row.blocks for row, _ in work]).int(),
        slot_mapping=torch.cat(slots),
        num_decodes=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
    )
    backend.begin_step([metadata])
    everything = torch.arange(int(starts[-1]))
    logits = model.forward(torch.cat(tokens), torch.cat(positions), everything)
    for (row, _), part in zip(work, torch.split(logits, query_lens), strict=True):
        row.logits.append(part)


def packed_logits(
    model: HFModel,
    rows: list[Tensor],
    steps: list[tuple[int, ...]],
    *,
    block_size: int,
    make_backend: BackendMaker = TorchAttentionBackend,
) -> list[Tensor]:
    """Logits `[T, vocab]` of every row, `steps` saying how many new tokens of each a step takes.

    The blocks of a row lie apart and out of order, and what was not written is not a number.
    """
    blocks_per_row = -(-max(map(len, rows)) // block_size)
    order = torch.randperm(len(rows) * blocks_per_row, generator=torch.Generator().manual_seed(1))
    paged = [
        PagedRow(row, blocks)
        for row, blocks in zip(rows, order.view(len(rows), blocks_per_row), strict=True)
    ]
    caches = []
    for spec in model.layer_specs:
        shape = (order.numel(), block_size, spec.num_kv_heads)
        caches.append(
            (
                torch.full((*shape, spec.head_dim), torch.nan, dtype=model.dtype),
                torch.full((*shape, spec.value_head_dim), torch.nan, dtype=model.dtype),
            )
        )
    backend = make_backend(model.layer_specs, caches, block_size)
    model.bind(backend)
    for step in steps:
        work = [(row, new) for row, new in zip(paged, step, strict=True) if new]
        run_step(model, backend, work, block_size)
    assert [row.computed for row in paged] == [len(row) for row in rows]
    return [torch.cat(row.logits) for row in paged]
