"""What a CPU reaches, how near a model comes to it, and which settings are fastest on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from statistics import median

from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

from cbatch_cli.bench.cpu_ceilings import Ceilings, CeilingSizes, measure_ceilings
from cbatch_cli.bench.cpu_phases import as_one_pass, phase_measurements, roofline_measurements
from cbatch_cli.bench.cpu_runs import PlainRun, TimedModel, load_timed
from cbatch_cli.bench.cpu_sweep import (
    LEAST_ROUNDS,
    Sweep,
    SweepLimits,
    alternatives,
    cut_short,
    repeated,
    sweep,
)
from cbatch_cli.bench.suite import Log, Measurement, Section, SuiteSettings
from cbatch_cli.bench.workload import Workload
from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import (
    BUILT_IN,
    CHOICES,
    CPUDefaults,
    DefaultsKey,
    forget_defaults,
    store_defaults,
)
from cbatch_cli.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUSizes:
    """How much is measured."""

    ceilings: CeilingSizes = field(default_factory=CeilingSizes)
    sweep_seconds_per_round: float = 100.0


def measure(settings: SuiteSettings, log: Log) -> Iterator[Section]:
    """Sections as they are measured. Raises `UsageError` for what does not run on CPU kernels."""
    yield from measure_sizes(settings, log, sizes=CPUSizes())


def measure_sizes(settings: SuiteSettings, log: Log, *, sizes: CPUSizes) -> Iterator[Section]:
    """The suite, as much of it as `sizes` say."""
    config = _on_cpu(settings.engine)
    if settings.rows is None:
        raise UsageError("--suite cpu needs rows to run")
    try:
        kernels = load_kernels()
    except KernelsUnavailable as error:
        raise UsageError(f"--suite cpu needs the compiled CPU kernels: {error}") from None
    model = load_timed(settings.model, settings.rows, config, kernels, log)
    ceilings = measure_ceilings(kernels, sizes.ceilings)
    yield _ceilings(model.key, ceilings)
    runs = []
    for number in range(1, settings.repeat + 1):
        runs.append(model.run(model.workload.requests, config))
        log(f"run {number} of {settings.repeat}: {runs[-1].stats.wall_s:.1f} s")
    yield _plain_runs(model, runs)
    profiled = model.profile()
    yield Section(
        title=f"Where the time goes, with every kernel a call of its own: {profiled.wall_s:.1f} s",
        measurements=list(phase_measurements(profiled, ceilings)),
    )
    wall_s = median(run.stats.wall_s for run in runs)
    calls = profiled.calls
    if model.is_one_pass:
        calls = list(as_one_pass(calls))
    yield Section(
        title="The products and attention of a plain run at the ceilings",
        measurements=list(
            roofline_measurements(
                calls,
                ceilings,
                wall_s=wall_s,
                is_float32=config.quantization == "none",
            )
        ),
    )
    limits = SweepLimits(
        num_rounds=settings.repeat, seconds_per_round=sizes.sweep_seconds_per_round
    )
    yield _sweep(model, wall_s, limits, log)


def _on_cpu(config: EngineConfig) -> EngineConfig:
    """`config` for our kernels on a CPU. Raises `UsageError` for what they do not compute."""
    wrong = {
        f"--device {config.device}": config.device.startswith("cuda"),
        f"--attention-backend {config.attention_backend}": config.attention_backend
        not in ("auto", "cpu"),
        f"--dtype {config.dtype}": config.dtype not in ("auto", "float32"),
        f"--kv-cache-dtype {config.kv_cache_dtype}": config.kv_cache_dtype
        not in ("auto", "bfloat16"),
        "--overlap": config.overlap,
        "--cuda-graphs": config.cuda_graphs,
        "--no-deterministic": config.deterministic is False,
    }
    for option, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(f"--suite cpu measures our CPU kernels, which {option} leaves out")
    return dataclasses.replace(config, device="cpu", dtype="float32", attention_backend="cpu")


def _ceilings(key: DefaultsKey, ceilings: Ceilings) -> Section:
    threads = _counted(key.num_threads, "thread")
    return Section(
        title=f"Ceilings of {key.processor}, {threads}, {key.kernels} kernels",
        measurements=[
            Measurement(name="read", value=ceilings.read_bytes / 1e9, unit="GB/s"),
            Measurement(
                name="float32 product",
                value=ceilings.float32_flops / 1e9,
                unit="GFLOP/s",
                note=ceilings.float32_by,
            ),
            Measurement(
                name="w8a16 product",
                value=ceilings.w8a16_flops / 1e9,
                unit="GFLOP/s",
                note="our product of 8-bit weights",
            ),
            Measurement(
                name="w8a8 product",
                value=ceilings.w8a8_flops / 1e9,
                unit="GFLOP/s",
                note="our product of 8-bit weights and activations",
            ),
        ],
    )


def _plain_runs(model: TimedModel, runs: list[PlainRun]) -> Section:
    """The workload as a job runs it."""
    summaries = [run.stats.summary() for run in runs]
    limits = runs[0].limits
    occupancy = summaries[0]["step_occupancy_until_tail"]
    rates = [
        Measurement(name=name, value=median(summary[key] for summary in summaries), unit="tokens/s")
        for name, key in (("output", "output_tokens_per_s"), ("in and out", "total_tokens_per_s"))
    ]
    outside_ms = median(1e3 * run.outside_s / run.stats.num_steps for run in runs)
    is_whole = model.has_whole_layers
    return Section(
        title=f"{model.workload.name}, {len(model.workload.requests)} rows, {model.key.precision}: "
        f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens a step, blocks "
        f"of {limits.block_size}",
        measurements=[
            *rates,
            Measurement(name="wall time", value=median(run.stats.wall_s for run in runs), unit="s"),
            Measurement(name="steps", value=summaries[0]["steps"]),
            Measurement(name="step occupancy", value=summaries[0]["step_occupancy"], unit="%"),
            Measurement(
                name="step occupancy while rows wait",
                value=occupancy,
                unit="%",
                note="" if occupancy is not None else "no row has to wait",
            ),
            Measurement(
                name="Python, a step",
                value=outside_ms if is_whole else None,
                unit="ms",
                note="all that is neither in our kernels nor in sampling"
                if is_whole
                else "some layers do not run on our kernels alone",
            ),
        ],
    )


def _sweep(model: TimedModel, wall_s: float, limits: SweepLimits, log: Log) -> Section:
    """The settings that nobody gave, one changed at a time, and what is made of the best."""
    config = model.config
    fixed = [name for name in CHOICES if getattr(config, name) is not None]
    candidates = alternatives(fixed)
    # All rounds, those of what won together too, are to fit into the time.
    num_runs = limits.num_rounds * (len(candidates) + 1 + 3)
    requests = repeated(model.workload.requests)
    wall_s *= len(requests) / len(model.workload.requests)
    share = min(1.0, limits.seconds / num_runs / wall_s)
    requests = cut_short(requests, share)
    rows = _rows_text(model.workload, len(requests), share)
    rounds = _counted(limits.num_rounds, "round")
    log(f"sweep: {rounds} of {len(candidates) + 1} settings on {rows}")
    # A prompt that comes again must not favour small blocks, of which it finds more.
    config = dataclasses.replace(config, prefix_caching=False)

    def rate(candidate: CPUDefaults) -> float:
        changes = dataclasses.asdict(candidate)
        given = {name: getattr(config, name) for name in fixed}
        run = model.run(requests, dataclasses.replace(config, **(changes | given)))
        return float(run.stats.summary()["total_tokens_per_s"])

    found = sweep(candidates, rate, limits, log)
    outcome = _keep(model.key, found, fixed, limits)
    log(outcome)
    return Section(
        title=f"Settings, on {rows}; {_counted(found.num_rounds, 'round')}, tokens in and out, no "
        "prefix caching",
        measurements=[
            *(
                Measurement(name=str(candidate), value=tokens_per_s, unit="tokens/s")
                for candidate, tokens_per_s in found.rates.items()
            ),
            Measurement(name="best over the built-in", value=found.speedup, unit="x", note=outcome),
        ],
    )


def _rows_text(workload: Workload, num_rows: int, share: float) -> str:
    """The rows that the settings are compared on."""
    again = " over and over" if num_rows > len(workload.requests) else ""
    cut = f", cut to {share:.0%} of their tokens" if share < 1.0 else ""
    return f"{num_rows} rows: those of {workload.name}{again}{cut}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _keep(key: DefaultsKey, found: Sweep, fixed: Collection[str], limits: SweepLimits) -> str:
    """Store the best settings as defaults of later runs; what was done, in a sentence."""
    if fixed:
        return f"nothing is stored, since {', '.join(fixed)} was given"
    if limits.num_rounds < LEAST_ROUNDS:
        return f"nothing is stored, which takes --repeat {LEAST_ROUNDS} or more"
    if found.num_rounds < LEAST_ROUNDS:
        return "nothing is stored, since there was no time for a second round"
    try:
        if found.best == BUILT_IN:
            was_stored = forget_defaults(key)
            return "the built-in settings stay" + ", and stored ones are gone" * was_stored
        path = store_defaults(key, found.best, speedup=found.speedup)
    except (OSError, RuntimeError) as error:
        return f"{found.best} cannot be stored: {error}"
    return f"{found.best}: later runs take these as defaults, until {path} is removed"
