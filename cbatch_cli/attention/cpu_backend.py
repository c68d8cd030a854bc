"""Paged attention by our own compiled kernel for CPUs.

One call per layer stores the step's keys and values and attends over all sequences, decodes and
chunks alike. A token's result has the same bits whatever else is in the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from cbatch_kernels.cpu_library import (
    ATTENTION_COLUMNS,
    AttentionArguments,
    CPUKernels,
    address,
    as_words,
    load_kernels,
    num_threads,
)
from torch import Tensor

from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec

CACHE_DTYPES = (torch.float32, torch.bfloat16)
"""What keys and values may be kept in; scores and sums are float32 in any case."""


_STEP_COLUMNS = [
    ATTENTION_COLUMNS[name]
    for name in (
        *("block_tables", "block_table_stride", "query_start_loc", "seq_lens", "slot_mapping"),
        *("num_seqs", "num_threads"),
    )
]
"""What of a layer's arguments the layout of a step is."""


class CPUAttentionBackend:
    """Attention over caches k `[num_blocks, block_size, KV, D]` and v `[..., Dv]`.

    `caches` holds one (k, v) pair per layer, of a dtype in `CACHE_DTYPES`. Other strides of the
    first three dimensions are allowed. Raises `KernelsUnavailable` without the compiled kernels,
    `ValueError` for caches of another dtype.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        caches: Sequence[tuple[Tensor, Tensor]],
        block_size: int,
        kernels: CPUKernels | None = None,
    ) -> None:
        self._kernels = kernels or load_kernels()
        self._metadata: Sequence[AttentionMetadata] = ()
        self._caches = tuple(caches)
        self._all_arguments = (AttentionArguments * len(layers))()
        self.words = as_words(self._all_arguments)
        """int64 `[num_layers, words]`: the step's layout and each layer's cache, as the layers
        were given, for kernels that attend on their way."""
        self._arguments: dict[int, AttentionArguments] = {}
        for row, (layer, (k_cache, v_cache)) in enumerate(zip(layers, caches, strict=True)):
            if k_cache.dtype not in CACHE_DTYPES or v_cache.dtype != k_cache.dtype:
                raise ValueError(f"k_cache.dtype is {k_cache.dtype}, not one of {CACHE_DTYPES}")
            if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
                raise ValueError("the last dimension of a cache must be contiguous")
            self._all_arguments[row] = AttentionArguments(
                k_cache=address(k_cache),
                k_block_stride=k_cache.stride(0),
                k_slot_stride=k_cache.stride(1),
                k_head_stride=k_cache.stride(2),
                v_cache=address(v_cache),
                v_block_stride=v_cache.stride(0),
                v_slot_stride=v_cache.stride(1),
                v_head_stride=v_cache.stride(2),
                window=layer.sliding_window or 0,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                value_head_dim=layer.value_head_dim,
                block_size=block_size,
                cache_is_bfloat16=k_cache.dtype == torch.bfloat16,
            )
            self._arguments[layer.index] = self._all_arguments[row]
        groups = np.array([layer.group for layer in layers])
        self._places_of_groups = [
            np.ix_(groups == group, _STEP_COLUMNS) for group in range(groups.max() + 1)
        ]

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Take the layout of the next forward pass, one entry per KV group."""
        self._metadata = metadata
        for group, places in enumerate(self._places_of_groups):
            entry = metadata[group]
            self.words[places] = (
                entry.block_tables.data_ptr(),
                entry.block_tables.stride(0),
                entry.query_start_loc.data_ptr(),
                entry.seq_lens.data_ptr(),
                entry.slot_mapping.data_ptr(),
                len(entry.seq_lens_cpu),
                num_threads(),
            )

    def arguments(self, layer: LayerSpec) -> AttentionArguments:
        """The step's layout and the layer's cache, for kernels that attend on their way."""
        return self._arguments[layer.index]

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
        dtype = query.dtype
        query, key, value = _as_rows(query), _as_rows(key), _as_rows(value)
        num_tokens = query.shape[0]
        covered = sum(self._metadata[layer.group].query_lens_cpu)
        # Tokens that belong to no sequence come out as zeros.
        new = query.new_empty if covered == num_tokens else query.new_zeros
        output = new((num_tokens, layer.num_heads, layer.value_head_dim))
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()

        arguments = self._arguments[layer.index]
        arguments.query = query.data_ptr()
        arguments.query_token_stride, arguments.query_head_stride, _ = query.stride()
        arguments.key = key.data_ptr()
        arguments.key_token_stride, arguments.key_head_stride, _ = key.stride()
        arguments.value = value.data_ptr()
        arguments.value_token_stride, arguments.value_head_stride, _ = value.stride()
        arguments.output = output.data_ptr()
        arguments.sinks = address(sinks)
        arguments.scale = scale
        arguments.softcap = softcap or 0.0
        arguments.num_tokens = num_tokens
        self._kernels.attention(ctypes.addressof(arguments))
        return output.to(dtype)


def _as_rows(states: Tensor) -> Tensor:
    """float32 whose last dimension is contiguous."""
    states = states.to(torch.float32)
    return states if states.stride(-1) == 1 else states.contiguous()
