"""What the kernels mean, in plain PyTorch: slow, one token at a time, in any float dtype.

These definitions are the oracle of the tests. Cache layout: `k_cache` is
`[num_blocks, block_size, num_kv_heads, head_dim]`, `v_cache` the same with its own last
dimension; position p of a sequence lies in block `block_table[p // block_size]` at offset
`p % block_size`. Query head h reads KV head `h // (num_heads // num_kv_heads)`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write keys `[T, KV, D]` and values `[T, KV, Dv]` of T tokens into the caches, in place.

    `slot_mapping` `[T]` holds block * block_size + offset for each token; -1 skips the token.
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_cache[block, offset] = key[token]
            v_cache[block, offset] = value[token]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries `[T, H, D]` over a paged cache; returns `[T, H, Dv]`.

    Sequence s owns the queries `query_start_loc[s]` to `query_start_loc[s + 1]`; they are the
    last of its `seq_lens[s]` positions, all of which are in the cache. `block_tables` is
    `[S, B]`. A token sees `sliding_window` positions, itself included, or all before it.
    `softcap` c turns a score x into c * tanh(x / c). `sinks` `[H]` are logits of one more
    position per head, which takes its share of the softmax and adds nothing to the output.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = query.shape[1] // num_kv_heads
    output = query.new_zeros(*query.shape[:2], v_cache.shape[-1])
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        for token in range(start, end):
            position = seq_len - (end - token)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = torch.arange(oldest, position + 1, device=query.device)
            blocks = block_tables[sequence, visible // block_size].long()
            offsets = visible % block_size
            for head in range(query.shape[1]):
                kv_head = head // group_size
                scores = k_cache[blocks, offsets, kv_head] @ query[token, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].to(scores.dtype)])
                weights = torch.softmax(scores, dim=0)[: len(visible)]
                output[token, head] = weights @ v_cache[blocks, offsets, kv_head]
    return output
