"""Puts an engine together around a loaded model: KV cache, attention, sampler, scheduler."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import BUILT_IN, CPUDefaults, defaults_for
from cbatch_cli.engine.admission import ContinuousAdmission, StaticAdmission
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.memory import available_memory
from cbatch_cli.engine.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from cbatch_cli.attention.backend import AttentionBackend
    from cbatch_cli.attention.metadata import KVScales
    from cbatch_cli.engine.kv_groups import KVGroups
    from cbatch_cli.models.hf_model import HFModel
    from cbatch_cli.runner_setup import RunnerFeatures

CPU_MEMORY_SHARE = 0.25
"""Of what is available once the model is loaded, the KV pool's share on a CPU."""

Log = Callable[[str], None]
"""Takes single lines for people."""


def print_nothing(line: str) -> None:
    """A `Log` for callers that want no lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """The engine's sizes and ways, those filled in that the configuration leaves open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    num_blocks: int
    overlap: bool
    """Whether a step is launched while the one before it runs."""
    cuda_graphs: bool
    """Whether steps in which everybody decodes are recorded and replayed."""


class _BindBackend(Protocol):
    """Binds attention over a new KV cache to the model."""

    def __call__(
        self, num_blocks: int, *, block_size: int, max_num_seqs: int
    ) -> AttentionBackend: ...


def build_core(
    model: HFModel,
    config: EngineConfig,
    log: Log = print_nothing,
    *,
    wrap_attention: Callable[[AttentionBackend], AttentionBackend] | None = None,
) -> tuple[EngineCore, EngineLimits]:
    """An engine over a loaded model, which it takes over: the last one built is the one that runs.

    `wrap_attention` is given what the layers are to attend by, and gives what takes its place.
    Raises `UsageError` for settings that do not fit the model or the memory.
    """
    from cbatch_cli.models.devices import on_device

    with on_device(model.device):
        return _build_core(model, config, log, wrap_attention)


def _build_core(
    model: HFModel,
    config: EngineConfig,
    log: Log,
    wrap_attention: Callable[[AttentionBackend], AttentionBackend] | None,
) -> tuple[EngineCore, EngineLimits]:
    from cbatch_cli.attention.backend import build_attention_backend
    from cbatch_cli.engine.kv_cache import KVCache
    from cbatch_cli.engine.kv_groups import group_layers
    from cbatch_cli.runner_setup import RunnerSizes, build_runner, resolve_features

    model.unbind()  # the KV cache of an engine built before it would take the new one's memory
    groups = group_layers(model.layer_specs)
    kv_dtype = resolve_kv_dtype(model, config)
    kv_scales = _kv_scales(model, kv_dtype, log)

    def bind_backend(num_blocks: int, *, block_size: int, max_num_seqs: int) -> AttentionBackend:
        cache = KVCache(
            groups,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_dtype,
            device=model.device,
        )
        backend = build_attention_backend(
            model.attention_backend,
            groups.layers,
            cache.layers,
            block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=model.max_model_len,
            deterministic=bool(config.deterministic),
            kv_scales=kv_scales,
        )
        if wrap_attention is not None:
            backend = wrap_attention(backend)
        model.bind(backend, groups.layers)
        return backend

    features = resolve_features(config, model, log)
    limits = _resolve_limits(config, model, groups, features, bind_backend, kv_dtype, log=log)
    backend = bind_backend(
        limits.num_blocks, block_size=limits.block_size, max_num_seqs=limits.max_num_seqs
    )
    # A config may name ids that the model cannot give.
    eos_token_ids = frozenset(i for i in model.eos_token_ids if i < model.vocab_size)
    policy = (
        StaticAdmission(limits.max_num_seqs)
        if config.scheduler == "static"
        else ContinuousAdmission()
    )
    scheduler = Scheduler(
        blocks=KVBlocks(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            windows=groups.windows,
            prefix_caching=config.prefix_caching,
        ),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        eos_token_ids=eos_token_ids,
        policy=policy,
    )
    runner, features = build_runner(
        model,
        backend,
        features,
        RunnerSizes(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            num_kv_groups=len(groups.windows),
            max_sequence_tokens=scheduler.max_sequence_tokens,
        ),
        config=config,
        eos_token_ids=eos_token_ids,
        log=log,
    )
    if scheduler.max_sequence_tokens < limits.max_model_len:
        log(
            f"the KV cache ends an answer at {scheduler.max_sequence_tokens:,} tokens, prompt "
            f"included, before the context of {limits.max_model_len:,} does; --kv-cache-memory "
            "gives it more"
        )
    core = EngineCore(
        scheduler=scheduler,
        runner=runner,
        step_timeout_s=config.step_timeout,
        vocab_size=model.vocab_size,
    )
    return core, dataclasses.replace(limits, cuda_graphs=features.cuda_graphs)


def dtype_name(dtype: torch.dtype) -> str:
    """As it is called in options and reports, without the name of the library."""
    return str(dtype).removeprefix("torch.")


def resolve_kv_dtype(model: HFModel, config: EngineConfig) -> torch.dtype:
    """What keys and values are kept in. Raises `UsageError` for what cannot be kept here."""
    from cbatch_cli.attention.cache_dtype import choose_cache_dtype

    return choose_cache_dtype(
        config.kv_cache_dtype, model.attention_backend, dtype=model.dtype, device=model.device
    )


def resolve_block_size(model: HFModel, config: EngineConfig) -> int:
    """Token positions in a KV block of an engine with these settings."""
    kv_dtype = resolve_kv_dtype(model, config)
    return _block_size(config, model, _cpu_defaults(model, config, kv_dtype, print_nothing))


def _block_size(config: EngineConfig, model: HFModel, on_cpu: CPUDefaults) -> int:
    return config.block_size or (16 if model.device.type == "cuda" else on_cpu.block_size)


def _cpu_defaults(
    model: HFModel, config: EngineConfig, kv_dtype: torch.dtype, log: Log
) -> CPUDefaults:
    """The sizes that nobody gives: measured ones are for our kernels."""
    if model.attention_backend != "cpu":
        return BUILT_IN
    return defaults_for(
        quantization=config.quantization,
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(kv_dtype),
        log=log,
    )


def _kv_scales(model: HFModel, kv_dtype: torch.dtype, log: Log) -> Mapping[int, KVScales]:
    """By the layer's index, for a cache of eight bits; 1 where the checkpoint says nothing."""
    from cbatch_cli.attention.cache_dtype import is_fp8, scales_for

    if not is_fp8(kv_dtype):
        return {}
    scales = model.kv_scales
    num_layers = len(model.layer_specs)
    if len(scales) < num_layers:
        log(
            f"{num_layers - len(scales)} of {num_layers} layers keep keys and values of eight bits "
            "with a scale of 1, for the checkpoint has none"
        )
    return scales_for(kv_dtype, scales)


def _resolve_limits(
    config: EngineConfig,
    model: HFModel,
    groups: KVGroups,
    features: RunnerFeatures,
    bind_backend: _BindBackend,
    kv_dtype: torch.dtype,
    *,
    log: Log,
) -> EngineLimits:
    from cbatch_cli.engine.kv_cache import block_bytes, fit_num_blocks

    on_gpu = model.device.type == "cuda"
    on_cpu = _cpu_defaults(model, config, kv_dtype, log)
    budget = config.max_num_batched_tokens or (8192 if on_gpu else on_cpu.max_num_batched_tokens)
    max_num_seqs = config.max_num_seqs or (256 if on_gpu else on_cpu.max_num_seqs)
    if max_num_seqs > budget:
        log(f"max_num_seqs {max_num_seqs} is cut to {budget}, the tokens of one step")
        max_num_seqs = budget
    block_size = _block_size(config, model, on_cpu)

    def free_memory() -> int:
        if not on_gpu:
            return int(available_memory() * CPU_MEMORY_SHARE)
        return _free_gpu_memory(
            config,
            model,
            features,
            new_backend=lambda: bind_backend(1, block_size=block_size, max_num_seqs=max_num_seqs),
            num_tokens=budget,
            num_seqs=max_num_seqs,
            num_kv_groups=len(groups.windows),
            block_size=block_size,
        )

    num_blocks = config.num_kv_blocks or fit_num_blocks(
        memory=config.kv_cache_memory or free_memory(),
        block_nbytes=block_bytes(groups, block_size=block_size, dtype=kv_dtype),
        block_size=block_size,
        windows=groups.windows,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=model.max_model_len,
    )
    return EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        max_model_len=model.max_model_len,
        num_blocks=num_blocks,
        overlap=features.overlap,
        cuda_graphs=features.cuda_graphs,
    )


def _free_gpu_memory(
    config: EngineConfig,
    model: HFModel,
    features: RunnerFeatures,
    *,
    new_backend: Callable[[], AttentionBackend],
    num_tokens: int,
    num_seqs: int,
    num_kv_groups: int,
    block_size: int,
) -> int:
    """Bytes for the KV pool, after the largest steps have shown what they need beside it."""
    import torch

    from cbatch_cli.engine.cuda_graphs import graph_sizes
    from cbatch_cli.engine.device import cuda_peak_bytes
    from cbatch_cli.engine.memory_profile import kv_pool_bytes, measure_steps

    steps = measure_steps(
        model,
        new_backend,
        functools.partial(cuda_peak_bytes, model.device),
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_kv_groups=num_kv_groups,
        block_size=block_size,
        max_model_len=model.max_model_len,
    )
    model.unbind()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return kv_pool_bytes(
        free=free,
        total=total,
        utilization=config.gpu_memory_utilization,
        steps=steps,
        num_graphs=len(graph_sizes(num_seqs)) if features.cuda_graphs else 0,
        logits_bytes=num_seqs * model.vocab_size * torch.float32.itemsize,
    )
