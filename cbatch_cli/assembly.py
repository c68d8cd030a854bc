"""Puts an engine together: model, KV cache, attention, sampler, scheduler."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.admission import ContinuousAdmission, StaticAdmission
from cbatch_cli.engine.client import EngineClient
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.memory import available_memory
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.errors import UsageError
from cbatch_cli.request import SamplingParams

if TYPE_CHECKING:
    import torch
    from cbatch_kernels.cpu_library import CPUKernels
    from cbatch_kernels.cpu_linear import LinearMode
    from transformers import PreTrainedTokenizerBase

    from cbatch_cli.engine.kv_groups import KVGroups
    from cbatch_cli.models.fusion import FusionReport
    from cbatch_cli.models.hf_model import HFModel
    from cbatch_cli.models.model_files import ModelFiles
    from cbatch_cli.models.padded_generate import PaddedGenerator

DEFAULT_MAX_TOKENS = 256
CPU_MEMORY_SHARE = 0.25
"""Of what is available once the model is loaded, the KV pool's share on a CPU."""

Log = Callable[[str], None]
"""Takes single lines for people."""


def print_nothing(line: str) -> None:
    """A `Log` for callers that want no lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEngine:
    """An engine ready to run, and what is known of its model."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    generation_defaults: Mapping[str, Any]
    """Fields of the model's generation config that say how to sample."""
    description: Mapping[str, Any]
    """The model's name and commit and the engine's settings as they were resolved."""
    load_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """The engine's sizes, those filled in that the configuration leaves open."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_model_len: int
    num_blocks: int


def identify_model(name: str) -> str:
    """What tells a model from any other, found without loading it: its commit or its content.

    Raises as `load_engine` does for a model that is not there.
    """
    from cbatch_cli.models.model_files import folder_identity, resolve_model

    files = resolve_model(name)
    return files.commit or folder_identity(files.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model and its tokenizer, around which engines can be built, one at a time."""

    files: ModelFiles
    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    load_s: float
    trust_remote_code: bool
    fusion: FusionReport | None

    def build_engine(self, config: EngineConfig, log: Log = print_nothing) -> LoadedEngine:
        """An engine with a KV cache of its own; the one before it must not be used any more.

        Raises `UsageError` for settings that do not fit the model or the memory.
        """
        start = time.monotonic()
        core, limits = build_core(self.model, config, log)
        return LoadedEngine(
            client=core,
            tokenizer=self.tokenizer,
            generation_defaults=self.model.generation_defaults,
            description={
                "model": self.files.name,
                "commit": self.files.commit,
                "vocab_size": self.model.vocab_size,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "device": str(self.model.device),
                "scheduler": config.scheduler,
                "prefix_caching": config.prefix_caching,
                "seed": config.seed,
                "attention_backend": self.model.attention_backend,
                "fusion": None if self.fusion is None else self.fusion.as_dict(),
                **dataclasses.asdict(limits),
            },
            load_s=self.load_s + time.monotonic() - start,
        )

    def release_engine(self) -> None:
        """Give the KV cache of the engine built last back; it must not be used any more."""
        self.model.unbind()
        # An engine and who listens to it hold each other.
        gc.collect()

    def padded_generator(self) -> PaddedGenerator:
        """The same weights, loaded once more, as transformers runs them."""
        from cbatch_cli.models.padded_generate import PaddedGenerator

        return PaddedGenerator.load(
            self.files,
            dtype=self.model.dtype,
            device=self.model.device,
            trust_remote_code=self.trust_remote_code,
        )


def load_for_engines(
    model_name: str,
    config: EngineConfig,
    log: Log = print_nothing,
    *,
    before_fusion: Callable[[HFModel], None] | None = None,
    kernels: CPUKernels | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    `before_fusion` is called with the model while its layers are still transformers' own;
    `kernels` are the compiled CPU kernels to use, in place of those that fit the processor.
    Raises `ModelError` for a model that cannot be found or would not run correctly.
    """
    start = time.monotonic()
    # Imported here: torch and transformers take seconds, and a bad option should be told at once.
    from cbatch_cli.models.loading import load_model, resolve_model
    from cbatch_cli.text.tokenizer import load_tokenizer

    files = resolve_model(model_name)
    tokenizer = load_tokenizer(files.folder, trust_remote_code=config.trust_remote_code)
    model = load_model(
        files,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend,
        trust_remote_code=config.trust_remote_code,
    )
    if before_fusion is not None:
        before_fusion(model)
    fusion = _fuse(model, config, log, kernels)
    return LoadedModel(
        files=files,
        model=model,
        tokenizer=tokenizer,
        load_s=time.monotonic() - start,
        trust_remote_code=config.trust_remote_code,
        fusion=fusion,
    )


def load_engine(model_name: str, config: EngineConfig, log: Log = print_nothing) -> LoadedEngine:
    """Load a model and build the engine around it.

    Raises `ModelError` for a model that cannot be found or would not run correctly, `UsageError`
    for settings that do not fit it.
    """
    return load_for_engines(model_name, config, log).build_engine(config, log)


def _fuse(
    model: HFModel, config: EngineConfig, log: Log, kernels: CPUKernels | None
) -> FusionReport | None:
    """Replace layers by fused ones where that is possible; None where nothing can be fused."""
    from cbatch_kernels.cpu_library import KernelsUnavailable

    from cbatch_cli.models.fusion import fuse_layers

    mode: LinearMode = "fast" if config.deterministic is False else "deterministic"
    wanted = "--deterministic" if config.deterministic else None
    if config.quantization == "w8a16":
        mode, wanted = "w8a16", "--quantization w8a16"
    is_float32_on_cpu = model.device.type == "cpu" and str(model.dtype) == "torch.float32"
    if not is_float32_on_cpu:
        if wanted is not None:
            raise UsageError(f"{wanted} needs a float32 model on a CPU")
        return None
    try:
        report = fuse_layers(model, mode=mode, kernels=kernels)
    except KernelsUnavailable as error:
        if wanted is not None:
            raise UsageError(f"{wanted} needs the compiled CPU kernels: {error}") from None
        log(f"the compiled CPU kernels are not in use: {error}")
        return None
    if wanted is not None and report.num_fused < report.num_layers:
        reasons = ", ".join(report.reasons)
        raise UsageError(f"{wanted} needs every layer to be fused, which failed: {reasons}")
    return report


def build_core(
    model: HFModel, config: EngineConfig, log: Log = print_nothing
) -> tuple[EngineCore, EngineLimits]:
    """An engine over a loaded model, which it takes over: the last one built is the one that runs.

    Raises `UsageError` for settings that do not fit the model or the memory.
    """
    from cbatch_cli.attention.backend import build_attention_backend
    from cbatch_cli.engine.kv_cache import KVCache
    from cbatch_cli.engine.kv_groups import group_layers
    from cbatch_cli.engine.model_runner import TorchModelRunner
    from cbatch_cli.engine.sampler import Sampler

    model.unbind()  # the KV cache of an engine built before it would take the new one's memory
    groups = group_layers(model.layer_specs)
    limits = _resolve_limits(config, model, groups, log=log)
    cache = KVCache(
        groups,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    backend = build_attention_backend(
        model.attention_backend,
        groups.layers,
        cache.layers,
        limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        deterministic=bool(config.deterministic),
    )
    model.bind(backend, groups.layers)
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
    runner = TorchModelRunner(
        model=model,
        backend=backend,
        sampler=Sampler(
            num_slots=limits.max_num_seqs, seed=config.seed, eos_token_ids=eos_token_ids
        ),
        num_slots=limits.max_num_seqs,
        num_kv_groups=len(groups.windows),
        max_blocks_per_sequence=-(-scheduler.max_sequence_tokens // limits.block_size),
        block_size=limits.block_size,
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
    return core, limits


def resolve_sampling(
    given: Mapping[str, Any],
    generation_defaults: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
) -> SamplingParams:
    """The run's sampling: what was given, then what the model's generation config says.

    Greedy unless that config says `do_sample` or a temperature above 0 was given. Raises
    `UsageError` for a combination out of range, and for a stop id beyond the model's vocabulary.
    """
    fields: dict[str, Any] = {
        "max_tokens": generation_defaults.get("max_new_tokens", DEFAULT_MAX_TOKENS)
    }
    if generation_defaults.get("do_sample") or given.get("temperature"):
        fields["temperature"] = 1.0
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if name in generation_defaults:
                fields[name] = generation_defaults[name]
    fields |= given
    if fields["max_tokens"] < fields.get("min_tokens", 0) and "max_tokens" not in given:
        fields["max_tokens"] = fields["min_tokens"]
    try:
        params = SamplingParams(**fields)
    except ValueError as error:
        raise UsageError(str(error)) from None
    last_id = max(params.stop_token_ids, default=0)
    if vocab_size is not None and last_id >= vocab_size:
        raise UsageError(f"stop_token_ids holds {last_id}, but the model has {vocab_size} tokens")
    return params


def _resolve_limits(
    config: EngineConfig, model: HFModel, groups: KVGroups, *, log: Log
) -> EngineLimits:
    from cbatch_cli.engine.kv_cache import block_bytes, fit_num_blocks

    on_gpu = model.device.type == "cuda"
    budget = config.max_num_batched_tokens or (8192 if on_gpu else 256)
    max_num_seqs = config.max_num_seqs or (256 if on_gpu else 32)
    if max_num_seqs > budget:
        log(f"max_num_seqs {max_num_seqs} is cut to {budget}, the tokens of one step")
        max_num_seqs = budget
    block_size = config.block_size or (16 if on_gpu else 64)
    num_blocks = config.num_kv_blocks or fit_num_blocks(
        memory=config.kv_cache_memory or _free_memory(config, model.device),
        block_nbytes=block_bytes(groups, block_size=block_size, dtype=model.dtype),
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
    )


def _free_memory(config: EngineConfig, device: torch.device) -> int:
    """Bytes for the KV pool."""
    if device.type != "cuda":
        return int(available_memory() * CPU_MEMORY_SHARE)
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1.0 - config.gpu_memory_utilization))


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """How a job comes by its engine."""

    identify: Callable[[str], str] = identify_model
    load: Callable[[str, EngineConfig, Log], LoadedEngine] = load_engine


DEFAULT_LOADER = EngineLoader()
