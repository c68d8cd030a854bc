"""A model on a CPU whose kernels are timed, and the runs of a workload on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cbatch_kernels.cpu_library import CPUKernels

from cbatch_cli.assembly import LoadedModel, build_core, load_for_engines
from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.bench.config import BenchConfig
from cbatch_cli.bench.cpu_phases import ProfiledRun
from cbatch_cli.bench.runner import bench_workload, warm_up_rows
from cbatch_cli.bench.suite import Log
from cbatch_cli.bench.timed_kernels import CallRecorder, TimedBackend, TimedKernels
from cbatch_cli.bench.workload import Workload
from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import DefaultsKey, key_for
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine_setup import EngineLimits, dtype_name, resolve_kv_dtype
from cbatch_cli.errors import EngineError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRun:
    """One run as a job's is, a layer a call."""

    stats: EngineStats
    limits: EngineLimits
    outside_s: float
    """Seconds that are neither in our kernels nor in sampling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedModel:
    """A loaded model and its workload; every run is on a new engine with an empty KV cache."""

    loaded: LoadedModel
    config: EngineConfig
    recorder: CallRecorder
    workload: Workload

    @property
    def key(self) -> DefaultsKey:
        """What defaults measured on it hold for."""
        return key_for(
            quantization=self.config.quantization,
            dtype=dtype_name(self.loaded.model.dtype),
            kv_dtype=dtype_name(resolve_kv_dtype(self.loaded.model, self.config)),
        )

    @property
    def has_whole_layers(self) -> bool:
        """Whether every layer runs on our kernels alone."""
        fusion = self.loaded.fusion
        return fusion is not None and fusion.num_fused == fusion.num_layers

    @property
    def is_one_pass(self) -> bool:
        """Whether plain runs are one pass, whose last layer computes only the rows that sample."""
        fusion = self.loaded.fusion
        return fusion is not None and fusion.is_one_pass

    def run(self, requests: Sequence[Request], config: EngineConfig) -> PlainRun:
        """Answer all requests, texts included. Raises `EngineError` for one that fails."""
        with self.recorder.recording() as calls:
            stats, limits = self._answer(requests, config)
        kernel_s = sum(call.seconds for call in calls)
        return PlainRun(
            stats=stats,
            limits=limits,
            outside_s=stats.wall_s - kernel_s - stats.phases_s["sample"],
        )

    def profile(self) -> ProfiledRun:
        """Answer the workload with every kernel called by itself, which gives the same bits.

        All layers compute all rows then, in transformers' own pass.
        """
        model = self.loaded.model
        itemsize = resolve_kv_dtype(model, self.config).itemsize

        def note_samples(_: object, __: object, inputs: dict[str, Any]) -> None:
            self.recorder.sample_indices = inputs["logits_to_keep"].tolist()

        handle = model.module.register_forward_pre_hook(note_samples, with_kwargs=True)
        try:
            with self.recorder.recording() as calls:
                stats, _ = self._answer(
                    self.workload.requests,
                    self.config,
                    lambda backend: TimedBackend(
                        backend,
                        self.recorder,
                        itemsize=itemsize,
                        last_layer=model.layer_specs[-1].index,
                    ),
                )
        finally:
            handle.remove()
        return ProfiledRun(
            calls=calls,
            wall_s=stats.wall_s,
            sampling_s=stats.phases_s["sample"],
            vocab_size=model.vocab_size,
        )

    def _answer(
        self,
        requests: Sequence[Request],
        config: EngineConfig,
        wrap_attention: Callable[[AttentionBackend], AttentionBackend] | None = None,
    ) -> tuple[EngineStats, EngineLimits]:
        try:
            core, limits = build_core(self.loaded.model, config, wrap_attention=wrap_attention)
            generation = TextGeneration(core, self.loaded.tokenizer)
            # All are queued before the first step, so that the schedule is the same in every run.
            for request in requests:
                generation.submit(request)
            for request, output in generation.generate(()):
                if output.error is not None:
                    row = request.key.row
                    raise EngineError(f"row {row} of the workload: {output.error.message}")
            return core.stats, limits
        finally:
            self.loaded.release_engine()


def load_timed(
    name: str, rows: BenchConfig, config: EngineConfig, kernels: CPUKernels, log: Log
) -> TimedModel:
    """The model of that name on `kernels`, warmed up, with the workload that `rows` names.

    Raises as `load_for_engines` and `bench_workload` do.
    """
    recorder = CallRecorder()
    timed = TimedKernels(kernels, recorder)
    loaded = load_for_engines(name, config, log, kernels=timed)
    engine = loaded.build_engine(config, log)
    workload = bench_workload(rows, engine, vocab_size=loaded.model.vocab_size)
    del engine
    loaded.release_engine()
    model = TimedModel(loaded=loaded, config=config, recorder=recorder, workload=workload)
    model.run(warm_up_rows(workload.requests), config)
    return model
