"""From the name of a model to an engine that is ready to run, and how it samples."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.client import EngineClient
from cbatch_cli.engine_setup import Log, build_core, dtype_name, print_nothing, resolve_kv_dtype
from cbatch_cli.errors import UsageError
from cbatch_cli.request import SamplingParams, check_stop_token_ids

if TYPE_CHECKING:
    from cbatch_kernels.cpu_library import CPUKernels
    from cbatch_kernels.cpu_linear import LinearMode
    from transformers import PreTrainedTokenizerBase

    from cbatch_cli.models.batch_invariant import InvarianceReport
    from cbatch_cli.models.fusion import FusionReport
    from cbatch_cli.models.hf_model import HFModel
    from cbatch_cli.models.model_files import ModelFiles
    from cbatch_cli.models.padded_generate import PaddedGenerator

__all__ = [
    "DEFAULT_LOADER",
    "EngineLoader",
    "LoadedEngine",
    "LoadedModel",
    "Log",
    "build_core",
    "identify_model",
    "load_engine",
    "load_for_engines",
    "optimise",
    "print_nothing",
    "resolve_sampling",
]

DEFAULT_MAX_TOKENS = 256


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


def identify_model(name: str) -> str:
    """What tells a model from any other, found without loading it: its commit or its content.

    Raises as `load_engine` does for a model that is not there.
    """
    from cbatch_cli.models.model_files import folder_identity, resolve_model

    files = resolve_model(name)
    return files.commit or folder_identity(files.folder)


def check_settings(config: EngineConfig) -> None:
    """Raise `UsageError`, as `load_engine` does, for what no model could run with here."""
    from cbatch_cli.engine_checks import check_without_model

    check_without_model(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model and its tokenizer, around which engines can be built, one at a time."""

    files: ModelFiles
    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    load_s: float
    trust_remote_code: bool
    fusion: FusionReport | None
    invariance: InvarianceReport | None = None
    """What `--deterministic` replaced on a GPU; on a CPU fused layers do what it asks for."""
    batch_invariant: bool = False
    """Whether a row's logits have the same bits whatever runs beside it."""

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
                "dtype": dtype_name(self.model.dtype),
                "device": str(self.model.device),
                "quantization": config.quantization,
                "kv_cache_dtype": dtype_name(resolve_kv_dtype(self.model, config)),
                "scheduler": config.scheduler,
                "prefix_caching": config.prefix_caching,
                "seed": config.seed,
                "attention_backend": self.model.attention_backend,
                "fusion": None if self.fusion is None else self.fusion.as_dict(),
                "batch_invariant": self.batch_invariant,
                "fixed_tiles": None if self.invariance is None else self.invariance.as_dict(),
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
    check_settings(config)
    # Imported here: transformers takes seconds, and a bad option should be told at once.
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
    resolve_kv_dtype(model, config)  # a dtype that cannot be kept here is told before the work
    if before_fusion is not None:
        before_fusion(model)
    fusion, invariance = optimise(model, config, log, kernels)
    return LoadedModel(
        files=files,
        model=model,
        tokenizer=tokenizer,
        load_s=time.monotonic() - start,
        trust_remote_code=config.trust_remote_code,
        fusion=fusion,
        invariance=invariance,
        batch_invariant=_is_batch_invariant(config, fusion),
    )


def optimise(
    model: HFModel,
    config: EngineConfig,
    log: Log = print_nothing,
    kernels: CPUKernels | None = None,
) -> tuple[FusionReport | None, InvarianceReport | None]:
    """Replace what runs faster, or as `config` promises, by code of our own; what that was.

    Raises `UsageError` and `ModelError` where a promise cannot be kept.
    """
    from cbatch_cli.models.devices import on_device

    with on_device(model.device):
        invariance = _make_batch_invariant(model, config, log)
        if invariance is not None:
            return None, invariance
        return _fuse(model, config, log, kernels), None


def load_engine(model_name: str, config: EngineConfig, log: Log = print_nothing) -> LoadedEngine:
    """Load a model and build the engine around it.

    Raises `ModelError` for a model that cannot be found or would not run correctly, `UsageError`
    for settings that do not fit it.
    """
    return load_for_engines(model_name, config, log).build_engine(config, log)


def _make_batch_invariant(
    model: HFModel, config: EngineConfig, log: Log
) -> InvarianceReport | None:
    """Where Triton runs, what `--deterministic` asks for; None where layers are to be fused."""
    if not config.deterministic or model.attention_backend != "triton":
        return None
    if config.quantization != "none":
        raise UsageError(f"--quantization {config.quantization} needs a float32 model on a CPU")
    from cbatch_cli.models.batch_invariant import make_batch_invariant

    report = make_batch_invariant(model)
    log(
        f"deterministic: {report.num_linears} linear layers and {report.num_norms} norms run on "
        "kernels with fixed tiles, and no layer is fused"
    )
    return report


def _fuse(
    model: HFModel, config: EngineConfig, log: Log, kernels: CPUKernels | None
) -> FusionReport:
    """Replace layers, and parts of others, by fused ones where that is possible.

    Raises `UsageError` for an option that needs more of it than there is.
    """
    from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

    from cbatch_cli.engine_checks import needs_fused_layers, require_float32_on_cpu
    from cbatch_cli.models.fusion import fuse_layers

    mode: LinearMode = "fast" if config.deterministic is False else "deterministic"
    if config.quantization != "none":
        mode = config.quantization
    wanted = needs_fused_layers(config)
    require_float32_on_cpu(config, model.attention_backend, model.device, model.dtype)
    is_float32_on_cpu = model.device.type == "cpu" and str(model.dtype) == "torch.float32"
    if is_float32_on_cpu and kernels is None:
        try:
            kernels = load_kernels()
        except KernelsUnavailable as error:
            log(f"the compiled CPU kernels are not in use: {error}")
    report = fuse_layers(model, mode=mode, kernels=kernels)
    if wanted is not None and report.num_fused < report.num_layers:
        reasons = ", ".join(report.reasons)
        raise UsageError(f"{wanted} needs every layer to be fused, which failed: {reasons}")
    return report


def _is_batch_invariant(config: EngineConfig, fusion: FusionReport | None) -> bool:
    """Whether a row's bits hang on it alone: where that was not asked for, layers may differ."""
    if fusion is None:
        return True  # kernels with fixed tiles
    has_own_products = config.quantization != "none" or config.deterministic is not False
    is_whole = fusion.operations == "compiled" and fusion.num_fused == fusion.num_layers
    return has_own_products and is_whole


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
    if vocab_size is not None and (problem := check_stop_token_ids(params, vocab_size)):
        raise UsageError(problem.message)
    return params


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """How a job comes by its engine."""

    identify: Callable[[str], str] = identify_model
    load: Callable[[str, EngineConfig, Log], LoadedEngine] = load_engine
    check: Callable[[EngineConfig], None] = lambda config: None
    """Before a model is looked for, which may be downloaded or converted then."""


DEFAULT_LOADER = EngineLoader(check=check_settings)
