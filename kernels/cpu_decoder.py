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
        self._rows_of_tables = [np.flatnonzero(tables == i) for i in range(tables.max() + 1)]
        self._rotates = np.array([layer.rotates for layer in layers], dtype=np.int64)

    def __call__(self, hidden_states: Tensor, tables: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """`[T, C]`, which is overwritten, to the last layer's output `[T, C]`.

        `tables` are pairs of cosines and sines `[T, R]`. Raises `ValueError` for what is not
        contiguous float32.
        """
        check_rows(hidden_states, *(table for pair in tables for table in pair))
        num_tokens = len(hidden_states)
        other = torch.empty_like(hidden_states)
        words, columns = self._words, LAYER_COLUMNS
        # Each layer reads what the one before it has written.
        for first, (source, target) in enumerate(((hidden_states, other), (other, hidden_states))):
            words[first::2, columns["hidden_states"]] = source.data_ptr()
            words[first::2, columns["residual"]] = target.data_ptr()
        words[:, columns["workspace"]] = self._workspace.address_of(
            max(num_workspace_floats(num_tokens, sizes) for sizes in self._row_sizes)
        )
        for rows, (cosines, sines) in zip(self._rows_of_tables, tables, strict=True):
            words[rows, columns["cosines"]] = cosines.data_ptr()
            words[rows, columns["sines"]] = sines.data_ptr()
            words[rows, columns["rotary_dim"]] = cosines.shape[1] * self._rotates[rows]
        self._attention_words[...] = self._attention
        self._attention_words[:, _OWN] = self._own_words
        self._attention_words[:, ATTENTION_COLUMNS["num_tokens"]] = num_tokens
        for kernels, arguments in self._steps:
            kernels.decoder_layer(arguments)
        return other if len(self._steps) % 2 else hidden_states


# `scale` and `softcap` share a word.
_OWN = [ATTENTION_COLUMNS["sinks"], ATTENTION_COLUMNS["scale"]]
