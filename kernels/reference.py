"""What the kernels mean, in plain PyTorch: slow, one token at a time, in any float dtype.

These definitions are the oracle of the tests. Cache layout: `k_cache` is
`[num_blocks, block_size, num_kv_heads, head_dim]`, `v_cache` the same with its own last
dimension; position p of a sequence lies in block `block_table[p // block_size]` at offset
`p % block_size`. Query head h reads KV head `h // (num_heads // num_kv_heads)`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def store_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys `[T, KV, D]` and values `[T, KV, Dv]` of T tokens into the caches, in place.

    `slot_mapping` `[T]` holds block * block_size + offset for each token; -1 skips the token. A
    cache of eight bits holds keys over `k_scale` and values over `v_scale`, and saturates.
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_cache[block, offset] = _quantise(key[token], k_scale, k_cache.dtype)
            v_cache[block, offset] = _quantise(value[token], v_scale, v_cache.dtype)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention of packed queries `[T, H, D]` over a paged cache; returns `[T, H, Dv]`.

    Sequence s owns the queries `query_start_loc[s]` to `query_start_loc[s + 1]`; they are the
    last of its `seq_lens[s]` positions, all of which are in the cache. `block_tables` is
    `[S, B]`. A token sees `sliding_window` positions, itself included, or all before it.
    `softcap` c turns a score x into c * tanh(x / c). `sinks` `[H]` are logits of one more
    position per head, which takes its share of the softmax and adds nothing to the output.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    keys, values = (cache.to(query.dtype).flatten(0, 1) for cache in (k_cache, v_cache))
    output = query.new_zeros(*query.shape[:2], v_cache.shape[-1])
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        for token in range(start, end):
            position = seq_len - (end - token)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = torch.arange(oldest, position + 1, device=query.device)
            blocks = block_tables[sequence, visible // block_size].long()
            slots = blocks * block_size + visible % block_size
            grouped = query[token].view(num_kv_heads, -1, query.shape[-1])
            scores = torch.einsum("kgd,skd->kgs", grouped, keys[slots] * k_scale) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                sink_scores = sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
                scores = torch.cat([scores, sink_scores], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : len(visible)]
            attended = torch.einsum("kgs,skd->kgd", weights, values[slots] * v_scale)
            output[token] = attended.flatten(0, 1)
    return output


def linear(states: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """States `[T, I]` times `weight` `[O, I]` transposed, plus `bias` `[O]`."""
    product = torch.einsum("ti,oi->to", states, weight)
    return product if bias is None else product + bias


def rms_norm(
    states: Tensor,
    weight: Tensor,
    *,
    eps: float,
    round_before_weight: bool,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in the dtype of `states`.

    The result is rounded to `dtype`, and with `round_before_weight` also before it is multiplied
    by `weight + weight_offset`.
    """
    normed = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + eps)
    if round_before_weight and dtype is not None:
        normed = normed.to(dtype).to(states.dtype)
    return (normed * (weight.to(states.dtype) + weight_offset)).to(dtype or states.dtype)


def rope(states: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """States `[T, H, D]` with the pairs of their first 2R dimensions rotated.

    `cos` and `sin` are `[T, R]`. A pair is (i, i + R), or (2i, 2i + 1) if interleaved.
    """
    rotated = states.clone()
    num_pairs = cos.shape[-1]
    for pair in range(num_pairs):
        first, second = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + num_pairs)
        c, s = cos[:, pair, None], sin[:, pair, None]
        x, y = states[..., first], states[..., second]
        rotated[..., first] = x * c - y * s
        rotated[..., second] = y * c + x * s
    return rotated


def act_and_mul(
    gate: Tensor,
    up: Tensor,
    *,
    activation: Literal["silu", "gelu_tanh"],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The activation of `gate`, rounded to `dtype`, times `up`, rounded again."""
    if activation == "silu":
        activated = gate * torch.sigmoid(gate)
    else:
        activated = torch.nn.functional.gelu(gate, approximate="tanh")
    dtype = dtype or gate.dtype
    return (activated.to(dtype).to(gate.dtype) * up).to(dtype)


def scale_logits(
    logits: Tensor,
    *,
    temperature: float,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    output_counts: Tensor | None = None,
    in_prompt: Tensor | None = None,
) -> Tensor:
    """One row of logits `[V]` after penalties and temperature; 0 divides by nothing."""
    if output_counts is not None and in_prompt is not None:
        was_made = output_counts > 0
        repeated = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(was_made | in_prompt, repeated, logits)
        logits = logits - frequency_penalty * output_counts - presence_penalty * was_made
    return logits / temperature if temperature > 0 else logits


def filter_threshold(
    logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> float:
    """The least logit of one row `[V]` that top_k, then top_p, then min_p keep."""
    descending = logits.sort(descending=True).values
    threshold = -math.inf
    if 0 < top_k < len(logits):
        threshold = float(descending[top_k - 1])
    if top_p < 1.0:
        weights = torch.exp(descending - descending[0]) * (descending >= threshold)
        reached = torch.searchsorted(weights.cumsum(0), top_p * weights.sum())
        threshold = max(threshold, float(descending[reached]))
    if min_p > 0.0:
        threshold = max(threshold, float(descending[0]) + math.log(min_p))
    return threshold


def gumbel_noise(vocab_size: int, *, seed: int, row: int, sample: int, position: int) -> Tensor:
    """Noise float64 `[V]` of one token to sample; the token of the highest logit + noise is drawn.

    The first Philox turns who samples into a key and half a counter, the second makes four words
    for every four tokens. Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011 (Philox4x32-10).
    """
    word0, word1, word2, word3 = philox4x32((position, sample, row, row >> 32), (seed, seed >> 32))
    words: list[int] = []
    for counter in range(-(-vocab_size // 4)):
        words += philox4x32((counter, word2, word3, 0), (word0, word1))
    uniform = (torch.tensor(words[:vocab_size], dtype=torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Ten rounds of Philox4x32 over the low 32 bits of every word."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = (word & low for word in counter)
    k0, k1 = (word & low for word in key)
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & low
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def _quantise(states: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return states
    highest = torch.finfo(dtype).max
    return (states / scale).clamp(-highest, highest).to(dtype)
