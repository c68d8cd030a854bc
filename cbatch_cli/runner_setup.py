"""Which runner computes the steps of an engine, and what it does beside: overlap, CUDA graphs."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cbatch_kernels.cpu_library import CPUKernels, KernelsUnavailable, load_kernels

from cbatch_cli.attention.backend import AttentionBackend, AttentionBackendName
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.client import ModelRunner, OverlappingRunner
from cbatch_cli.engine.cuda_graphs import graph_sizes
from cbatch_cli.engine.device import CudaGraphCapture, CudaQueue, GraphCapture
from cbatch_cli.engine.device_runner import DeviceModelRunner
from cbatch_cli.engine.device_sampler import DeviceSampler, SamplingKernels
from cbatch_cli.engine.model_runner import TorchModelRunner
from cbatch_cli.engine.sampler import Sampler
from cbatch_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from cbatch_cli.models.hf_model import HFModel

Log = Callable[[str], None]


class Placed(Protocol):
    """A model, or what is known of where one is going to run."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def attention_backend(self) -> AttentionBackendName:
        """What its attention runs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerFeatures:
    """What a runner does on its device."""

    is_device_runner: bool
    """Whether steps are computed beside the CPU, sampling included."""
    overlap: bool
    """Whether a step is launched while the one before it runs."""
    cuda_graphs: bool
    """Whether steps in which everybody decodes are recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSizes:
    """What a runner's buffers are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_groups: int
    max_sequence_tokens: int
    """The longest that a sequence can become."""

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of one group that the longest sequence holds."""
        return -(-self.max_sequence_tokens // self.block_size)


def resolve_features(config: EngineConfig, model: Placed, log: Log) -> RunnerFeatures:
    """What the configuration asks for and the device has.

    Raises `UsageError` where something is asked for that cannot be.
    """
    why_no_overlap = _why_not_beside_the_cpu(model)
    why_no_graphs = why_no_overlap
    if why_no_graphs is None and model.attention_backend != "triton":
        why_no_graphs = f"attention runs on {model.attention_backend}, not on triton"
    if config.overlap and why_no_overlap:
        raise UsageError(f"--overlap is not possible: {why_no_overlap}")
    if config.cuda_graphs and why_no_graphs:
        raise UsageError(f"--cuda-graphs is not possible: {why_no_graphs}")
    if model.device.type == "cuda" and config.cuda_graphs is None and why_no_graphs:
        log(f"CUDA graphs are not in use: {why_no_graphs}")
    return RunnerFeatures(
        is_device_runner=why_no_overlap is None,
        overlap=config.overlap is not False and why_no_overlap is None,
        cuda_graphs=config.cuda_graphs is not False and why_no_graphs is None,
    )


def build_runner(
    model: HFModel,
    backend: AttentionBackend,
    features: RunnerFeatures,
    sizes: RunnerSizes,
    *,
    config: EngineConfig,
    eos_token_ids: frozenset[int],
    log: Log,
) -> tuple[ModelRunner | OverlappingRunner, RunnerFeatures]:
    """A runner, and which of the features it has in the end.

    Raises `UsageError` if steps were asked to be recorded and cannot be.
    """
    if not features.is_device_runner:
        sampler = Sampler(
            num_slots=sizes.max_num_seqs,
            seed=config.seed,
            eos_token_ids=eos_token_ids,
            kernels=_cpu_kernels() if model.device.type == "cpu" else None,
        )
        runner = TorchModelRunner(
            model=model,
            backend=backend,
            sampler=sampler,
            num_slots=sizes.max_num_seqs,
            num_kv_groups=sizes.num_kv_groups,
            max_blocks_per_sequence=sizes.max_blocks_per_sequence,
            block_size=sizes.block_size,
        )
        return runner, features
    device_runner = DeviceModelRunner(
        model=model,
        backend=backend,
        sampler=DeviceSampler(
            num_slots=sizes.max_num_seqs,
            seed=config.seed,
            eos_token_ids=eos_token_ids,
            device=model.device,
            kernels=_triton_sampling_kernels(),
        ),
        queue=CudaQueue(model.device),
        num_slots=sizes.max_num_seqs,
        num_kv_groups=sizes.num_kv_groups,
        max_blocks_per_sequence=sizes.max_blocks_per_sequence,
        block_size=sizes.block_size,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        lag=int(features.overlap),
    )
    if features.cuda_graphs:
        why_not = try_graphs(
            device_runner, CudaGraphCapture(model.device), sizes, vocab_size=model.vocab_size
        )
        if why_not is not None:
            if config.cuda_graphs:
                raise UsageError(f"--cuda-graphs is not possible: {why_not}")
            log(f"CUDA graphs are not in use: {why_not}")
            features = dataclasses.replace(features, cuda_graphs=False)
    return device_runner, features


def try_graphs(
    runner: DeviceModelRunner, capture: GraphCapture, sizes: RunnerSizes, *, vocab_size: int
) -> str | None:
    """Record the decoding steps of `runner`; what keeps them from being recorded, if anything."""
    try:
        runner.capture_graphs(
            graph_sizes(sizes.max_num_seqs),
            capture,
            vocab_size=vocab_size,
            max_seq_len=sizes.max_sequence_tokens,
        )
    except Exception as error:  # a model's code may do anything that cannot be recorded
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def _cpu_kernels() -> CPUKernels | None:
    """The compiled kernels; None where they were not built, and torch samples."""
    try:
        return load_kernels()
    except KernelsUnavailable:
        return None


def _triton_sampling_kernels() -> SamplingKernels:
    from cbatch_kernels import sampling

    kernels: Any = sampling
    return kernels  # type: ignore[no-any-return]


def _why_not_beside_the_cpu(model: Placed) -> str | None:
    if model.device.type != "cuda":
        return f"the model runs on {model.device.type}, not on a GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, whose kernels sample on the GPU"
    return None
