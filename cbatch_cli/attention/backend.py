"""What a model needs from attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec


class AttentionBackend(Protocol):
    """Attention of one model over its paged KV caches."""

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Take the layout of the next forward pass, one entry per KV group."""

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
        """Store the step's keys and values, then attend; returns `[T, H, Dv]`.

        `query` is `[T, H, D]`, `key` `[T, KV, D]`, `value` `[T, KV, Dv]` for the T packed
        tokens of the step. The window is `layer.sliding_window`. `softcap` bounds the scores,
        `sinks` `[H]` are logits of one more position that adds nothing to the output.
        """
