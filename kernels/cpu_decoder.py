"""All decoder layers of a model on a CPU, one after another, in float32.

What changes from step to step is written for all layers at once: set field by field, the arguments
of a small step took longer than some of its kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cbatch_kernels.cpu_decoder_layer import DecoderLayer, check_rows, num_workspace_floats
from cbatch_kernels.cpu_library import (
    ATTENTION_COLUMNS,
    LAYER_COLUMNS,
    AttentionArguments,
    LayerArguments,
    address,
    as_words,
)
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """A layer and what its attention is called with in every step; sinks are float32 `[H]`."""

    layer: DecoderLayer
    scale: float
    softcap: float | None
    sinks: Tensor | None
    tables: int
    """Which of the step's pairs of rotation tables is the layer's."""


class Decoder:
    """Packed tokens `[T, C]` through all layers; `attention` are the arguments of each.

    `attention` is int64 `[num_layers, words]`: the arguments of every layer's attention as the
    backend keeps them, which holds the layout of the step when the layers run.
    """

    def __init__(self, calls: Sequence[LayerCall], attention: NDArray[np.int64]) -> None:
        self._calls, self._attention = tuple(calls), attention
        layers = [call.layer for call in calls]
        self._workspace = layers[0].workspace
        self._arguments = (LayerArguments * len(calls))(*(layer.arguments for layer in layers))
        self._words = as_words(self._arguments)
        first = LAYER_COLUMNS["attention"]
        self._attention_words = self._words[:, first : first + attention.shape[1]]
        size = ctypes.sizeof(LayerArguments)
        start = ctypes.addressof(self._arguments)
        self._steps = [(layer.kernels, start + index * size) for index, layer in enumerate(layers)]
        own = (AttentionArguments * len(calls))()
        for arguments, call in zip(own, calls, strict=True):
            arguments.scale, arguments.softcap = call.scale, call.softcap or 0.0
            arguments.sinks = address(call.sinks)
        self._own_words = as_words(own)[:, _OWN]
        bound = (AttentionArguments * len(calls)).from_buffer_copy(attention)
        self._row_sizes = {
            layer.row_sizes(arguments) for layer, arguments in zip(layers, bound, strict=True)
        }
        tables = np.array([call.tables for call in calls])
        self._layers_of_tables = [np.flatnonzero(tables == i) for i in range(tables.max() + 1)]
        self._rotates = np.array([layer.rotates for layer in layers], dtype=np.int64)

    def __call__(
        self, hidden_states: Tensor, tables: Sequence[tuple[Tensor, Tensor]], rows: Tensor
    ) -> Tensor:
        """`[T, C]`, which is overwritten, to the last layer's output `[N, C]` at `rows`.

        `tables` are pairs of cosines and sines `[T, R]`, `rows` are int64 `[N]`. Raises
        `ValueError` for what is not contiguous float32 or int64, `IndexError` for rows beyond T.
        """
        check_rows(hidden_states, *(table for pair in tables for table in pair))
        num_tokens, num_rows = len(hidden_states), len(rows)
        is_pruned = num_rows < num_tokens
        if is_pruned:
            _check_indices(rows, num_tokens)
        other = torch.empty_like(hidden_states)
        words, columns = self._words, LAYER_COLUMNS
        # Each layer reads what the one before it has written.
        for first, (source, target) in enumerate(((hidden_states, other), (other, hidden_states))):
            words[first::2, columns["hidden_states"]] = source.data_ptr()
            words[first::2, columns["residual"]] = target.data_ptr()
        words[:, columns["workspace"]] = self._workspace.address_of(
            max(num_workspace_floats(num_tokens, sizes) for sizes in self._row_sizes)
        )
        words[:, columns["num_rows"]] = num_tokens
        if is_pruned:
            # Every layer but the last is read by the next one's keys and values of all tokens.
            words[-1, columns["rows"]], words[-1, columns["num_rows"]] = rows.data_ptr(), num_rows
        for layers, (cosines, sines) in zip(self._layers_of_tables, tables, strict=True):
            words[layers, columns["cosines"]] = cosines.data_ptr()
            words[layers, columns["sines"]] = sines.data_ptr()
            words[layers, columns["rotary_dim"]] = cosines.shape[1] * self._rotates[layers]
        self._attention_words[...] = self._attention
        self._attention_words[:, _OWN] = self._own_words
        self._attention_words[:, ATTENTION_COLUMNS["num_tokens"]] = num_tokens
        for kernels, arguments in self._steps:
            kernels.decoder_layer(arguments)
        output = other if len(self._steps) % 2 else hidden_states
        return output[:num_rows] if is_pruned else output.index_select(0, rows)


def _check_indices(rows: Tensor, num_tokens: int) -> None:
    if rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(f"{rows.dtype} {list(rows.shape)} is not contiguous int64")
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < num_tokens):
        raise IndexError(f"rows lie outside of {num_tokens} tokens")


# `scale` and `softcap` share a word.
_OWN = [ATTENTION_COLUMNS["sinks"], ATTENTION_COLUMNS["scale"]]
