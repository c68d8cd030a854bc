"""The whole engine on models of random weights: its throughput, and what keeps it from more."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from cbatch_cli.assembly import build_core, optimise
from cbatch_cli.bench.suite import Log, Measurement
from cbatch_cli.bench.workload import make_up_workload
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.kv_cache import block_bytes
from cbatch_cli.engine.kv_groups import group_layers
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine_setup import resolve_kv_dtype
from cbatch_cli.errors import EngineError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.random_models import random_model
from cbatch_cli.request import Request, RequestKey, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """What is run on a model."""

    num_requests: int = 96
    """Of the workload of prompts and answers of very different lengths."""
    num_decoding: int = 256
    """Rows that decode at the same time in the load that memory limits."""
    prompt_len: int = 64
    output_len: int = 256
    profiled_output_len: int = 24
    max_model_len: int = 4096


def engine_measurements(
    shape: Mapping[str, Any],
    config: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    bytes_per_s: float,
    repeat: int,
    sizes: EngineSizes,
    log: Log,
) -> Iterator[Measurement]:
    """Throughput on a mixed workload, and a load of decodes beside what memory allows.

    `bytes_per_s` is what the device's memory gives. The mixed workload is run `repeat` times, and
    the median counts. What `config` says goes before `sizes`.
    """
    model = random_model(
        shape,
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len or sizes.max_model_len,
        attention_backend=config.attention_backend,
    )
    optimise(model, config, log)
    try:
        yield from _mixed(model, config, sizes, repeat, log)
        yield from _decoding(model, config, sizes, bytes_per_s, log)
    finally:
        model.unbind()
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def roofline_s(
    *,
    weight_bytes: int,
    kv_bytes_per_token: float,
    num_steps: int,
    context_lens: Iterable[int],
    bytes_per_s: float,
) -> float:
    """The least time of decoding: weights once a step, keys and values once a token.

    `context_lens` has the length of its row for every token that is decoded.
    """
    num_bytes = num_steps * weight_bytes + kv_bytes_per_token * sum(context_lens)
    return num_bytes / bytes_per_s


def idle_share(intervals: Sequence[tuple[float, float]]) -> float | None:
    """How much of the time from the first start to the last end no interval covers, 0..1."""
    if not intervals:
        return None
    ordered = sorted(intervals)
    begin = reached = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        if end > reached:
            busy += end - max(start, reached)
            reached = end
    return 1.0 - busy / (reached - begin) if reached > begin else None


def _mixed(
    model: HFModel, config: EngineConfig, sizes: EngineSizes, repeat: int, log: Log
) -> Iterator[Measurement]:
    workload = make_up_workload(
        sizes.num_requests,
        seed=config.seed,
        vocab_size=model.vocab_size,
        max_sequence_tokens=model.max_model_len,
    )
    _run(model, config, workload.requests[:2], log)  # compiles kernels
    runs = [_run(model, config, workload.requests, log).summary() for _ in range(repeat)]
    for name, key in (("output", "output_tokens_per_s"), ("in and out", "total_tokens_per_s")):
        yield Measurement(
            name=f"mixed workload, {name}",
            value=median(run[key] for run in runs),
            unit="tokens/s",
        )
    summary = runs[0]
    yield Measurement(
        name="mixed workload, step occupancy while rows wait",
        value=summary["step_occupancy_until_tail"],
        unit="%",
        note="" if summary["step_occupancy_until_tail"] is not None else "no row has to wait",
    )


def _decoding(
    model: HFModel, config: EngineConfig, sizes: EngineSizes, bytes_per_s: float, log: Log
) -> Iterator[Measurement]:
    num_rows = config.max_num_seqs or sizes.num_decoding
    config = dataclasses.replace(config, max_num_seqs=num_rows)
    stats = _run(model, config, _equal_rows(model, num_rows, sizes, sizes.output_len), log)
    summary = stats.summary()
    groups = group_layers(model.layer_specs)
    least_s = roofline_s(
        weight_bytes=model.num_parameter_bytes,
        kv_bytes_per_token=block_bytes(groups, block_size=1, dtype=resolve_kv_dtype(model, config))
        * len(groups.windows),
        num_steps=summary["steps"],
        context_lens=(
            sizes.prompt_len + made for made in range(sizes.output_len) for _ in range(num_rows)
        ),
        bytes_per_s=bytes_per_s,
    )
    rows = f"{num_rows} rows decode"
    yield Measurement(name=f"{rows}, output", value=summary["output_tokens_per_s"], unit="tokens/s")
    yield Measurement(
        name=f"{rows}, share of the roofline", value=least_s / stats.wall_s, unit="%", target=0.7
    )
    yield Measurement(name=f"{rows}, step occupancy", value=summary["step_occupancy"], unit="%")
    phases = stats.phases_s
    yield Measurement(
        name=f"{rows}, scheduler a step",
        value=1e3 * (phases["schedule"] + phases["update"]) / summary["steps"],
        unit="ms",
    )
    idle = _idle(model, config, _equal_rows(model, num_rows, sizes, sizes.profiled_output_len), log)
    yield Measurement(
        name=f"{rows}, device idle",
        value=idle,
        unit="%",
        target=0.03,
        at_most=True,
        note="" if idle is not None else "the profiler saw no device",
    )


def _equal_rows(
    model: HFModel, num_rows: int, sizes: EngineSizes, output_len: int
) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (num_rows, sizes.prompt_len), generator=generator)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    return [
        Request(key=RequestKey(row), prompt_token_ids=tuple(prompt), params=params)
        for row, prompt in enumerate(ids.tolist())
    ]


def _run(
    model: HFModel, config: EngineConfig, requests: Sequence[Request], log: Log
) -> EngineStats:
    """What a new engine counts over the requests, all of them queued before its first step."""
    core, _ = build_core(model, config, log)
    for request in requests:
        core.submit(request)
    for output in core.generate(()):
        if output.error is not None:
            raise EngineError(f"row {output.key.row}: {output.error.message}")
    return core.stats


def _idle(
    model: HFModel, config: EngineConfig, requests: Sequence[Request], log: Log
) -> float | None:
    """The share of the time in which nothing runs on the device, as its profiler sees it."""
    if model.device.type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _run(model, config, requests, log)
    events = profiler.events() or []
    return idle_share(
        [
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == DeviceType.CUDA
        ]
    )
