"""Paged attention in plain PyTorch: runs everywhere, and needs no compiler.

Every sequence is attended apart, so that its result does not depend on what runs beside it and
nothing is padded. Its keys and values are gathered from the blocks it needs (with a window: only
those the window reaches) into a buffer that all sequences share, which keeps the copy in the
processor's cache. Queries of one KV head are stacked, so that a group costs one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbatch_cli.attention.metadata import AttentionMetadata, KVScales, LayerSpec

# Long chunks are cut into tiles of queries: the scores of a tile stay in the processor's cache,
# and keys that lie after the whole tile are not multiplied at all. 64 was the fastest of 32 to
# 1024 on two CPUs; a GPU wants fewer, larger products.
_QUERY_TILE_CPU = 64
_QUERY_TILE_GPU = 512

_NO_SCALES = KVScales()


class TorchAttentionBackend:
    """Attention over caches k `[num_blocks, block_size, KV, D]` and v `[..., Dv]`.

    `caches` holds one (k, v) pair per layer, by the layer's index, of any float dtype; in one of
    eight bits keys and values are over their layer's `kv_scales`. What a narrower dtype cannot
    hold saturates. Scores, softmax and sums are computed in float32, or in float64 for float64
    queries.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        caches: Sequence[tuple[Tensor, Tensor]],
        block_size: int,
        *,
        kv_scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        self._block_size = block_size
        self._caches = {layer.index: cache for layer, cache in zip(layers, caches, strict=True)}
        self._kv_scales = kv_scales or {}
        self._metadata: Sequence[AttentionMetadata] = ()
        self._slots: list[_Slots] = []
        self._plans: dict[tuple[int, int | None], list[_SequencePlan]] = {}
        self._gathered: dict[tuple[torch.dtype, str], Tensor] = {}

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Take the layout of the next forward pass, one entry per KV group."""
        self._metadata = metadata
        self._slots = [_usable_slots(entry.slot_mapping) for entry in metadata]
        self._plans.clear()

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
        """Store keys `[T, KV, D]` and values `[T, KV, Dv]`, attend `[T, H, D]`: `[T, H, Dv]`."""
        k_cache, v_cache = self._caches[layer.index]
        slots = self._slots[layer.group]
        scales = self._kv_scales.get(layer.index, _NO_SCALES)
        slots.store(key, k_cache, scales.k)
        slots.store(value, v_cache, scales.v)

        # Tokens that belong to no sequence come out as zeros.
        output = query.new_zeros(query.shape[0], layer.num_heads, layer.value_head_dim)
        compute_dtype = torch.promote_types(query.dtype, torch.float32)
        # A key is what the cache holds times its scale, and the same goes for a value.
        query = query.to(compute_dtype) * (scale * scales.k)
        if sinks is not None:
            sinks = sinks.to(compute_dtype).view(layer.num_kv_heads, -1, 1, 1)
        for plan in self._sequence_plans(layer.group, layer.sliding_window):
            keys = self._gather(k_cache, plan, "k").to(compute_dtype)
            values = self._gather(v_cache, plan, "v").to(compute_dtype)
            for tile in plan.tiles:
                attended = _attend(
                    query[tile.start : tile.end],
                    keys[:, tile.first_key : tile.last_key],
                    values[:, tile.first_key : tile.last_key],
                    tile,
                    softcap=softcap,
                    sinks=sinks,
                )
                output[tile.start : tile.end] = attended * scales.v if scales.v != 1.0 else attended
        return output

    def _sequence_plans(self, group: int, window: int | None) -> list[_SequencePlan]:
        """What to read for each sequence; made once a step and shared by like layers."""
        plans = self._plans.get((group, window))
        if plans is None:
            plans = _plan_sequences(self._metadata[group], self._block_size, window)
            self._plans[group, window] = plans
        return plans

    def _gather(self, cache: Tensor, plan: _SequencePlan, name: str) -> Tensor:
        """Keys or values of one sequence, `[KV, plan.num_keys, D]`, valid until the next call."""
        num_kv_heads, head_dim = cache.shape[2:]
        dtype = cache.dtype
        if dtype.itemsize == 1:
            cache = cache.view(torch.uint8)  # torch moves bytes, but not floats of eight bits
        blocks = cache.view(cache.shape[0], -1)
        needed = plan.num_blocks * blocks.shape[1]
        buffer = self._gathered.get((cache.dtype, name))
        if buffer is None or buffer.numel() < needed:
            buffer = cache.new_empty(2 * needed)
            self._gathered[cache.dtype, name] = buffer
        rows = buffer[:needed].view(plan.num_blocks, -1)
        torch.index_select(blocks, 0, plan.block_ids, out=rows)
        tokens = rows.view(dtype).view(-1, num_kv_heads, head_dim)
        return tokens[plan.skipped : plan.skipped + plan.num_keys].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the tokens of a step are stored; `tokens` is None if every one of them is."""

    slots: Tensor
    tokens: Tensor | None

    def store(self, states: Tensor, cache: Tensor, scale: float) -> None:
        """Write `states` `[T, KV, D]` over `scale` into `cache`, rounding to its dtype."""
        if self.tokens is not None:
            states = states.index_select(0, self.tokens)
        states = _rounded(states, cache.dtype, scale)
        if states.dtype.itemsize == 1:
            cache, states = cache.view(torch.uint8), states.view(torch.uint8)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self.slots, states)


def _rounded(states: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """States over `scale` in `dtype`; what is out of its range saturates, NaN stays NaN."""
    if dtype.itemsize == 1:
        states = states.to(torch.float32) * (1.0 / scale)
    highest = torch.finfo(dtype).max
    if highest < torch.finfo(states.dtype).max:
        states = states.clamp(-highest, highest)
    return states.to(dtype)


def _usable_slots(slot_mapping: Tensor) -> _Slots:
    tokens = (slot_mapping >= 0).nonzero().view(-1)
    if tokens.shape[0] == slot_mapping.shape[0]:
        return _Slots(slot_mapping, None)
    return _Slots(slot_mapping.index_select(0, tokens), tokens)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of one sequence and the gathered keys that they see."""

    start: int
    end: int
    """Range of queries in the pack."""
    first_key: int
    last_key: int
    """Range of keys, counted from the first one gathered; the last query is the last key."""
    hidden_after: Tensor | None
    """bool `[n, n]` over the last n keys: those that come after a query."""
    hidden_before: Tensor | None
    """bool `[n, m]` over the first m keys: those that a query's window no longer reaches."""


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """The blocks of one sequence that are read in this step."""

    block_ids: Tensor
    num_blocks: int
    skipped: int
    """Positions at the head of the first block that no query sees."""
    num_keys: int
    tiles: tuple[_Tile, ...]


def _plan_sequences(
    metadata: AttentionMetadata, block_size: int, window: int | None
) -> list[_SequencePlan]:
    block_tables = metadata.block_tables
    is_cpu = block_tables.device.type == "cpu"
    tile_size = _QUERY_TILE_CPU if is_cpu else _QUERY_TILE_GPU
    plans = []
    start = 0
    lengths = zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, strict=True)
    for sequence, (query_len, seq_len) in enumerate(lengths):
        end = start + query_len
        if query_len:
            oldest = _first_visible(seq_len - query_len, window)
            first_block = oldest // block_size
            last_block = -(-seq_len // block_size)
            tiles = (
                _plan_tile(
                    tile_start,
                    min(tile_start + tile_size, end),
                    position=seq_len - (end - tile_start),
                    oldest=oldest,
                    window=window,
                    device=block_tables.device,
                )
                for tile_start in range(start, end, tile_size)
            )
            plans.append(
                _SequencePlan(
                    block_ids=block_tables[sequence, first_block:last_block],
                    num_blocks=last_block - first_block,
                    skipped=oldest - first_block * block_size,
                    num_keys=seq_len - oldest,
                    tiles=tuple(tiles),
                )
            )
        start = end
    return plans


def _plan_tile(
    start: int, end: int, *, position: int, oldest: int, window: int | None, device: torch.device
) -> _Tile:
    """The tile of queries `start` to `end`, the first of which is at `position`."""
    num_queries = end - start
    first_key = _first_visible(position, window)
    hidden_after = hidden_before = None
    if num_queries > 1:
        square = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device)
        hidden_after = square.triu(1)
        if window is not None:
            # Query j hides the keys up to position + j - window: the first `edge` + j + 1 ones.
            edge = position - window - first_key
            num_columns = min(edge + num_queries, position + num_queries - first_key)
            if num_columns > 0:
                rows = torch.ones(num_queries, num_columns, dtype=torch.bool, device=device)
                hidden_before = rows.tril(edge)
    return _Tile(
        start=start,
        end=end,
        first_key=first_key - oldest,
        last_key=position + num_queries - oldest,
        hidden_after=hidden_after,
        hidden_before=hidden_before,
    )


def _first_visible(position: int, window: int | None) -> int:
    """The oldest position that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tile: _Tile,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of scaled queries `[n, H, D]` over `[KV, S, D]` and `[KV, S, Dv]`: `[n, H, Dv]`.

    `sinks` is `[KV, H / KV, 1, 1]`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, value_head_dim = values.shape
    grouped = query.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(num_kv_heads, -1, head_dim), keys.transpose(1, 2))
    scores = scores.view(num_kv_heads, -1, num_queries, num_keys)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if tile.hidden_after is not None:
        scores[..., num_keys - num_queries :].masked_fill_(tile.hidden_after, -torch.inf)
    if tile.hidden_before is not None:
        columns = tile.hidden_before.shape[1]
        scores[..., :columns].masked_fill_(tile.hidden_before, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    attended = torch.bmm(weights.view(num_kv_heads, -1, num_keys), values)
    attended = attended.view(num_kv_heads, -1, num_queries, value_head_dim)
    if sinks is not None:
        # A sink adds exp(sink) to the sum that the weights were divided by.
        attended = attended * torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sinks)
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, value_head_dim)
