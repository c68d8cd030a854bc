"""What can be told of an engine's settings before a model is loaded, and what needs none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cbatch_cli.attention.backend import AttentionBackendName, choose_attention_backend
from cbatch_cli.attention.cache_dtype import choose_cache_dtype
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine_setup import print_nothing
from cbatch_cli.errors import UsageError
from cbatch_cli.models.devices import resolve_device
from cbatch_cli.runner_setup import resolve_features


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """Where a model is going to run."""

    device: torch.device
    attention_backend: AttentionBackendName


def check_without_model(config: EngineConfig) -> None:
    """Raise `UsageError`, as the engine would, for what this machine does not have.

    What hangs on the model's own dtype is left to the engine.
    """
    device = resolve_device(config.device)
    given: torch.dtype | None = None if config.dtype == "auto" else getattr(torch, config.dtype)
    dtype = given or torch.float32
    backend = choose_attention_backend(config.attention_backend, device, dtype)
    if given is not None or backend != "triton" or config.kv_cache_dtype.startswith("fp8"):
        choose_cache_dtype(config.kv_cache_dtype, backend, dtype=dtype, device=device)
    require_float32_on_cpu(config, backend, device, dtype)
    placement = _Placement(device=device, attention_backend=backend)
    resolve_features(config, placement, print_nothing)


def needs_fused_layers(config: EngineConfig) -> str | None:
    """The option that every layer must be fused for, on our kernels for float32 on a CPU."""
    if config.quantization != "none":
        return f"--quantization {config.quantization}"
    return "--deterministic" if config.deterministic else None


def require_float32_on_cpu(
    config: EngineConfig, backend: AttentionBackendName, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `UsageError` where an option needs our kernels and a model would not run on them."""
    option = needs_fused_layers(config)
    if option is None or (option == "--deterministic" and backend == "triton"):  # fixed tiles
        return
    if device.type != "cpu" or dtype != torch.float32:
        also = "" if config.quantization != "none" else ", or Triton's attention on a GPU"
        raise UsageError(f"{option} needs a float32 model on a CPU{also}")
    from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

    try:
        load_kernels()
    except KernelsUnavailable as error:
        raise UsageError(f"{option} needs the compiled CPU kernels: {error}") from None
