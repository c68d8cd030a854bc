"""Runs the contenders over a workload and sums up what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from cbatch_cli import __version__
from cbatch_cli.assembly import (
    LoadedEngine,
    LoadedModel,
    Log,
    load_for_engines,
    print_nothing,
    resolve_sampling,
)
from cbatch_cli.bench.config import BenchConfig
from cbatch_cli.bench.contenders import (
    Contender,
    EngineContender,
    GenerateContender,
    require_comparable,
)
from cbatch_cli.bench.workload import Workload, make_up_workload, read_workload
from cbatch_cli.config import EngineConfig
from cbatch_cli.request import Request

LoadModel = Callable[[str, EngineConfig], LoadedModel]

_WARM_UP_ROWS = _WARM_UP_TOKENS = 2


def run_bench(
    config: BenchConfig, *, log: Log = print_nothing, load: LoadModel = load_for_engines
) -> dict[str, Any]:
    """Run every contender `repeat` times, in turn, and return all that was measured.

    Every run starts with an empty KV cache. Raises `CBatchError`, `UsageError` for a row that
    cannot be run among them.
    """
    loaded = load(config.job.model, config.job.engine)
    engine = loaded.build_engine(config.job.engine, log)
    workload = bench_workload(config, engine, vocab_size=loaded.model.vocab_size)
    description = {key: value for key, value in engine.description.items() if key != "scheduler"}
    del engine
    loaded.release_engine()
    # The sizes depend on the memory that is free; all runs get those of the first engine.
    pinned = dataclasses.replace(
        config.job.engine,
        max_num_seqs=description["max_num_seqs"],
        max_num_batched_tokens=description["max_num_batched_tokens"],
        block_size=description["block_size"],
        num_kv_blocks=description["num_blocks"],
    )
    contenders: list[Contender] = [
        EngineContender(loaded, dataclasses.replace(pinned, scheduler=name))
        for name in config.schedulers
    ]
    if config.with_generate:
        require_comparable(workload.requests)
        contenders.append(GenerateContender(loaded, batch_size=description["max_num_seqs"]))
    return {
        "cbatch_version": __version__,
        "workload": {
            "name": workload.name,
            "rows": len(workload.requests),
            "prompt_tokens": workload.num_prompt_tokens,
            "max_output_tokens": workload.max_output_tokens,
        },
        "resolved": {"engine": description},
        "load_s": round(loaded.load_s, 4),
        "repeat": config.repeat,
        "contenders": _measure(contenders, workload.requests, repeat=config.repeat, log=log),
    }


def bench_workload(config: BenchConfig, engine: LoadedEngine, *, vocab_size: int) -> Workload:
    """The rows that `config` names, or made-up ones, as `engine` takes them.

    Raises `UsageError` for a row that cannot be run.
    """
    if config.num_made_up is not None:
        return make_up_workload(
            config.num_made_up,
            seed=config.job.engine.seed,
            vocab_size=vocab_size,
            max_sequence_tokens=engine.client.max_sequence_tokens,
        )
    return read_workload(
        config.job,
        tokenizer=engine.tokenizer,
        defaults=resolve_sampling(config.job.sampling_options, engine.generation_defaults),
        max_model_len=engine.description["max_model_len"],
        kv_capacity_tokens=engine.client.max_sequence_tokens,
    )


def _measure(
    contenders: Sequence[Contender], requests: Sequence[Request], *, repeat: int, log: Log
) -> dict[str, dict[str, Any]]:
    """The runs of every contender by its name, and what they come to."""
    runs: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.run(warm_up_rows(requests))
    # In turn, so that a machine that gets slower over time is unfair to nobody.
    for number in range(1, repeat + 1):
        for contender in contenders:
            run = contender.run(requests)
            runs[contender.name].append(run)
            speed = f"{run['output_tokens_per_s']:.1f} tokens/s out"
            log(f"run {number} of {repeat}, {contender.name}: {speed}, {run['wall_s']:.1f} s")
    return {
        name: {
            "median": _over_runs(median, results),
            "min": _over_runs(min, results),
            "max": _over_runs(max, results),
            "runs": results,
        }
        for name, results in runs.items()
    }


def warm_up_rows(requests: Sequence[Request]) -> list[Request]:
    """A few short rows: what is set up once must not count for whoever runs first."""
    return [
        dataclasses.replace(
            request,
            params=request.params.override(
                {"max_tokens": min(request.params.max_tokens, _WARM_UP_TOKENS), "min_tokens": 0}
            ),
        )
        for request in requests[:_WARM_UP_ROWS]
    ]


def _over_runs(
    reduce: Callable[[list[float]], float], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One number for each that the runs have, nested as in the runs."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        # A phase that a run never entered took no time.
        column = [run.get(name, 0) for run in runs]
        if all(isinstance(item, Mapping) for item in column):
            values[name] = _over_runs(reduce, column)
        elif all(isinstance(item, int | float) for item in column):
            values[name] = round(reduce(column), 4)
    return values
