"""What a model needs from attention."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from cbatch_cli.attention.metadata import AttentionMetadata, KVScales, LayerSpec
from cbatch_cli.errors import UsageError

AttentionBackendName = Literal["triton", "cpu", "torch"]


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


def choose_attention_backend(
    name: Literal["auto", "triton", "cpu", "torch"], device: torch.device, dtype: torch.dtype
) -> AttentionBackendName:
    """Which backend runs on `device` with keys and values of `dtype`.

    Auto is triton on CUDA and ROCm where it is installed, our compiled kernels on a CPU where they
    are, else torch. Raises `UsageError` when one is asked for that cannot run.
    """
    is_installed = importlib.util.find_spec("triton") is not None
    if name == "auto":
        if device.type == "cuda":
            return "triton" if is_installed else "torch"
        return "cpu" if _why_no_cpu_kernels(device, dtype) is None else "torch"
    if name == "cpu" and (reason := _why_no_cpu_kernels(device, dtype)):
        raise UsageError(f"attention backend cpu: {reason}")
    if name == "triton":
        if not is_installed:
            raise UsageError("attention backend triton: the package triton is not installed")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError(
                f"attention backend triton does not run on {device.type}; leave the option out for "
                "the fastest that does"
            )
    return name


def build_attention_backend(
    name: AttentionBackendName,
    layers: Sequence[LayerSpec],
    caches: Sequence[tuple[Tensor, Tensor]],
    block_size: int,
    *,
    max_num_seqs: int,
    max_model_len: int,
    deterministic: bool = False,
    kv_scales: Mapping[int, KVScales] | None = None,
) -> AttentionBackend:
    """The backend of that name over one (k, v) pair of caches per layer.

    `max_num_seqs` and `max_model_len` bound what a step can hold. `kv_scales`, by the layer's
    index, go with caches of eight bits.
    """
    if name == "torch":
        from cbatch_cli.attention.torch_backend import TorchAttentionBackend

        return TorchAttentionBackend(layers, caches, block_size, kv_scales=kv_scales)
    if name == "cpu":
        from cbatch_cli.attention.cpu_backend import CPUAttentionBackend

        return CPUAttentionBackend(layers, caches, block_size)
    from cbatch_cli.attention.triton_backend import TritonAttentionBackend

    return TritonAttentionBackend(
        layers,
        caches,
        block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        deterministic=deterministic,
        kv_scales=kv_scales,
    )


def _why_no_cpu_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the compiled kernels from running; None where they do."""
    from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

    from cbatch_cli.attention.cpu_backend import CACHE_DTYPES

    if device.type != "cpu":
        return f"it does not run on {device.type}"
    if dtype not in CACHE_DTYPES:
        return f"it does not run with {dtype}".replace("torch.", "")
    try:
        load_kernels()
    except KernelsUnavailable as error:
        return str(error)
    return None
