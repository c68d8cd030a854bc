"""The tensors behind the block ids, and how many of them memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.errors import UsageError


class KVCache:
    """Keys and values of every layer, in blocks. What was never written is not initialised.

    A machine gives out the memory of a block when it is first written, so a large pool costs
    nothing until it is used. `layers[i]` is (keys `[num_blocks, block_size, num_kv_heads,
    head_dim]`, values likewise with `value_head_dim`).
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = []
        for layer in layers:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            self.layers.append(
                (
                    torch.empty(*shape, layer.head_dim, dtype=dtype, device=device),
                    torch.empty(*shape, layer.value_head_dim, dtype=dtype, device=device),
                )
            )


def block_bytes(layers: Sequence[LayerSpec], *, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block in all layers, in bytes."""
    values_per_token = sum(
        layer.num_kv_heads * (layer.head_dim + layer.value_head_dim) for layer in layers
    )
    return values_per_token * block_size * dtype.itemsize


def fit_num_blocks(
    *, memory: int, block_nbytes: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks that fit into `memory` bytes, but no more than all sequences can ever fill.

    Raises `UsageError` when not even one block fits.
    """
    num_useful = max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(memory // block_nbytes, num_useful)
    if num_blocks < 1:
        raise UsageError(
            f"{memory / 2**20:.0f} MiB for the KV cache hold no block of "
            f"{block_nbytes / 2**20:.1f} MiB; give more with --kv-cache-memory or use a smaller "
            f"--block-size"
        )
    return num_blocks
