"""Random steps over a paged cache in which everything that must not be read is poisoned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from cbatch_kernels import reference
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec
from cbatch_cli.attention.torch_backend import TorchAttentionBackend

UNREADABLE_BLOCK = 0x3FFFFFFF


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """One step of one layer. Unused cache slots hold NaN, unused table entries no block at all."""

    layer: LayerSpec
    metadata: AttentionMetadata
    block_size: int
    query: Tensor
    key: Tensor
    value: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def run_backend(
        self, make_backend: Callable[..., AttentionBackend] = TorchAttentionBackend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output and caches after the step."""
        caches = (self.k_cache.clone(), self.v_cache.clone())
        backend = make_backend([self.layer], [caches], self.block_size)
        backend.begin_step([self.metadata])
        output = backend.forward(
            self.layer,
            self.query,
            self.key,
            self.value,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return output, *caches

    def run_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `run_backend` should give."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        slots = self.metadata.slot_mapping
        reference.store_kv(self.key, self.value, k_cache, v_cache, slots)
        output = reference.paged_attention(
            self.query,
            k_cache,
            v_cache,
            self.metadata.block_tables,
            self.metadata.query_start_loc,
            self.metadata.seq_lens,
            scale=self.scale,
            sliding_window=self.layer.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return output, k_cache, v_cache


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 8,
    value_head_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    stored_already: int = 0,
    dtype: torch.dtype = torch.float64,
) -> PagedCase:
    """A case of sequences given as (positions cached before, new positions).

    The first `stored_already` new tokens of each sequence are in the cache and have slot -1.
    """
    value_head_dim = value_head_dim or head_dim
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_heads = num_kv_heads * group_size
    seq_lens = [cached + new for cached, new in lengths]
    num_blocks = [math.ceil(length / block_size) for length in seq_lens]
    pool = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    k_cache = torch.full((len(pool), block_size, num_kv_heads, head_dim), math.nan, dtype=dtype)
    v_cache = torch.full(
        (len(pool), block_size, num_kv_heads, value_head_dim), math.nan, dtype=dtype
    )
    tables = torch.full((len(lengths), max(num_blocks) + 2), UNREADABLE_BLOCK, dtype=torch.int32)
    slot_mapping: list[int] = []
    for sequence, (cached, new) in enumerate(lengths):
        oldest = 0 if window is None else max(0, cached - window + 1)
        blocks = [pool.pop() for _ in range(num_blocks[sequence])]
        for index in range(oldest // block_size, len(blocks)):
            tables[sequence, index] = blocks[index]
        slots = [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(cached + new)
        ]
        present = min(cached + stored_already, cached + new)
        for position in range(oldest, present):
            block, offset = divmod(slots[position], block_size)
            k_cache[block, offset] = random(num_kv_heads, head_dim)
            v_cache[block, offset] = random(num_kv_heads, value_head_dim)
        slot_mapping += [-1] * (present - cached) + slots[present:]

    query_lens = tuple(new for _, new in lengths)
    num_tokens = sum(query_lens)
    starts = [sum(query_lens[:sequence]) for sequence in range(len(lengths) + 1)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slot_mapping, dtype=torch.int64),
        num_decodes=sum(new == 1 for new in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_cpu=query_lens,
        seq_lens_cpu=tuple(seq_lens),
    )
    layer = LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        sliding_window=window,
    )
    return PagedCase(
        layer=layer,
        metadata=metadata,
        block_size=block_size,
        query=random(num_tokens, num_heads, head_dim),
        key=random(num_tokens, num_kv_heads, head_dim),
        value=random(num_tokens, num_kv_heads, value_head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        scale=head_dim**-0.5,
        softcap=softcap,
        sinks=random(num_heads) if with_sinks else None,
    )
