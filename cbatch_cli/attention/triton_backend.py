"""Paged attention by our Triton kernels, on CUDA and ROCm devices.

Decodes run with split KV, chunks of prompts by query tiles. Where a token's bits must not depend
on the step, all run by query tiles of one size: a token may be decoded in one run and, after a
preemption or at the end of a prompt, be part of a chunk in another. Nothing is read back from the
device and, once the workspaces are there, nothing but the output is allocated. On CPU tensors the
same code runs under triton's interpreter, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from cbatch_kernels.kv_store import store_kv
from cbatch_kernels.paged_attention import paged_decode, paged_prefill
from cbatch_kernels.tiles import attention_tiles, num_decode_splits
from torch import Tensor

from cbatch_cli.attention.metadata import AttentionMetadata, KVScales, LayerSpec

_MAX_WORKSPACE_ELEMENTS = 1 << 26
"""Where more would be needed, decodes are launched a part at a time."""


class TritonAttentionBackend:
    """Attention over caches k `[num_blocks, block_size, KV, D]` and v `[..., Dv]`.

    `caches` holds one (k, v) pair per layer, of the queries' dtype or of an fp8 dtype, to which
    `kv_scales` applies by the layer's index. `max_num_seqs` and `max_model_len` size the
    workspaces. With `deterministic` a row's result has the same bits whatever else is in the step.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        caches: Sequence[tuple[Tensor, Tensor]],
        block_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        deterministic: bool = False,
        kv_scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        self._caches = {layer.index: cache for layer, cache in zip(layers, caches, strict=True)}
        for k_cache, _ in caches:
            if k_cache.shape[1] != block_size:
                raise ValueError(f"k_cache has blocks of {k_cache.shape[1]}, not of {block_size}")
        self._kv_scales = kv_scales or {}
        self._deterministic = deterministic
        self._device = caches[0][0].device if caches else torch.device("cpu")
        self._arch, self._num_processors = describe_device(self._device)
        self._steps: list[_GroupStep] = []
        num_partials, num_elements = self._workspace_size(layers, max_num_seqs, max_model_len)
        self._lse = torch.empty(num_partials, dtype=torch.float32, device=self._device)
        self._partials = torch.empty(num_elements, dtype=torch.float32, device=self._device)

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Take the layout of the next forward pass, one entry per KV group."""
        self._steps = [_GroupStep.of(entry, self._deterministic) for entry in metadata]

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
        """Store keys `[T, KV, D]` and values `[T, KV, Dv]`, attend `[T, H, D]`: `[T, H, Dv]`.

        Raises `ValueError` for a dtype or a head dimension that the kernels do not have.
        """
        k_cache, v_cache = self._caches[layer.index]
        scales = self._kv_scales.get(layer.index, KVScales())
        step = self._steps[layer.group]
        query, key, value = (_dense(states) for states in (query, key, value))
        store_kv(
            key,
            value,
            k_cache,
            v_cache,
            step.metadata.slot_mapping,
            k_scale=scales.k,
            v_scale=scales.v,
        )
        output = query.new_empty(query.shape[0], layer.num_heads, layer.value_head_dim)
        # Tokens that belong to no sequence come out as zeros.
        output[step.num_tokens :].zero_()
        attention = _LayerAttention(
            layer=layer,
            k_cache=k_cache,
            v_cache=v_cache,
            scales=scales,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        if step.num_decodes:
            self._decode(attention, step, query, output)
        if step.num_chunks:
            self._prefill(attention, step, query, output)
        return output

    def _prefill(
        self, attention: _LayerAttention, step: _GroupStep, query: Tensor, output: Tensor
    ) -> None:
        metadata, layer, start = step.metadata, attention.layer, step.num_decodes
        group_size = layer.num_heads // layer.num_kv_heads
        paged_prefill(
            query,
            attention.k_cache,
            attention.v_cache,
            metadata.block_tables[start:],
            metadata.query_start_loc[start:],
            metadata.seq_lens[start:],
            output,
            tiles=attention_tiles(
                self._arch,
                head_dim=max(layer.head_dim, layer.value_head_dim),
                dtype=query.dtype,
                kv_dtype=attention.k_cache.dtype,
                kind="prefill",
                has_window_or_cap=attention.has_window_or_cap,
                num_query_rows=None if self._deterministic else metadata.max_query_len * group_size,
            ),
            max_query_len=metadata.max_query_len,
            scale=attention.scale,
            sliding_window=layer.sliding_window,
            softcap=attention.softcap,
            sinks=attention.sinks,
            k_scale=attention.scales.k,
            v_scale=attention.scales.v,
        )

    def _decode(
        self, attention: _LayerAttention, step: _GroupStep, query: Tensor, output: Tensor
    ) -> None:
        metadata, layer = step.metadata, attention.layer
        tiles = attention_tiles(
            self._arch,
            head_dim=max(layer.head_dim, layer.value_head_dim),
            dtype=query.dtype,
            kv_dtype=attention.k_cache.dtype,
            kind="decode",
        )
        num_splits = num_decode_splits(
            num_seqs=step.num_decodes,
            num_kv_heads=layer.num_kv_heads,
            max_seq_len=metadata.max_seq_len,
            num_processors=self._num_processors,
            sliding_window=layer.sliding_window,
        )
        rows_at_once = step.num_decodes
        if num_splits > 1:
            per_row = layer.num_heads * num_splits
            rows_at_once = min(
                self._lse.numel() // per_row,
                self._partials.numel() // (per_row * layer.value_head_dim),
            )
        for start in range(0, step.num_decodes, rows_at_once):
            rows = slice(start, min(start + rows_at_once, step.num_decodes))
            paged_decode(
                query[rows],
                attention.k_cache,
                attention.v_cache,
                metadata.block_tables[rows],
                metadata.seq_lens[rows],
                output[rows],
                tiles=tiles,
                num_splits=num_splits,
                partials=self._partials,
                lse=self._lse,
                scale=attention.scale,
                sliding_window=layer.sliding_window,
                softcap=attention.softcap,
                sinks=attention.sinks,
                k_scale=attention.scales.k,
                v_scale=attention.scales.v,
            )

    def _workspace_size(
        self, layers: Sequence[LayerSpec], max_num_seqs: int, max_model_len: int
    ) -> tuple[int, int]:
        """Partial results that any step can need at once, and the numbers that they hold."""
        most_partials = most_elements = 1
        if self._deterministic:
            return most_partials, most_elements
        for layer in layers:
            for num_seqs in range(1, max_num_seqs + 1):
                num_splits = num_decode_splits(
                    num_seqs=num_seqs,
                    num_kv_heads=layer.num_kv_heads,
                    max_seq_len=max_model_len,
                    num_processors=self._num_processors,
                    sliding_window=layer.sliding_window,
                )
                if num_splits == 1:
                    continue
                per_row = layer.num_heads * num_splits
                num_rows = max(1, _MAX_WORKSPACE_ELEMENTS // (per_row * layer.value_head_dim))
                num_partials = min(num_seqs, num_rows) * per_row
                most_partials = max(most_partials, num_partials)
                most_elements = max(most_elements, num_partials * layer.value_head_dim)
        return most_partials, most_elements


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayerAttention:
    """What is the same for the decodes and the chunks of a layer."""

    layer: LayerSpec
    k_cache: Tensor
    v_cache: Tensor
    scales: KVScales
    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def has_window_or_cap(self) -> bool:
        return self.layer.sliding_window is not None or self.softcap is not None


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """The layout of a step, and how much of it decodes."""

    metadata: AttentionMetadata
    num_decodes: int
    num_chunks: int
    num_tokens: int

    @classmethod
    def of(cls, metadata: AttentionMetadata, all_are_chunks: bool) -> _GroupStep:
        num_seqs = len(metadata.query_lens_cpu)
        num_decodes = 0 if all_are_chunks else metadata.num_decodes
        return cls(metadata, num_decodes, num_seqs - num_decodes, sum(metadata.query_lens_cpu))


def _dense(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def describe_device(device: torch.device) -> tuple[str, int]:
    """The architecture, as the tables of tiles name it, and how many processors it has."""
    if device.type != "cuda":
        return "interpreter", 8
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0], properties.multi_processor_count
    return f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
