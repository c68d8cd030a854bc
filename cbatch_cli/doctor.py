"""`cbatch doctor`: what this machine offers, and what became of a model that was loaded."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cbatch_cli.assembly import Log, load_for_engines, print_nothing
from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import defaults_of_machine
from cbatch_cli.engine.memory import available_memory
from cbatch_cli.engine_setup import dtype_name, resolve_block_size, resolve_kv_dtype

if TYPE_CHECKING:
    from cbatch_kernels.cpu_library import CPUKernels

    from cbatch_cli.assembly import LoadedModel
    from cbatch_cli.models.hf_model import HFModel
    from cbatch_cli.models.step_observation import StepObservation

_LONG_CONTEXT = 8192
_PACKAGES = ("cbatch", "torch", "transformers", "triton", "pyarrow")


def environment_facts() -> dict[str, Any]:
    """Versions, devices, threads, kernels and free memory in bytes, as plain values."""
    import torch

    kernels = _load_kernels()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        # The version of torch itself also names the build.
        "packages": {name: _version(name) for name in _PACKAGES} | {"torch": torch.__version__},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "gpus": [_gpu_facts(index) for index in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": None if isinstance(kernels, str) else kernels.variant,
        "cpu_kernels_missing": kernels if isinstance(kernels, str) else None,
        "cpu_defaults": {} if isinstance(kernels, str) else _stored_defaults(),
        "available_memory": available_memory(),
    }


def model_facts(
    name: str, config: EngineConfig, log: Log = print_nothing, *, with_operations: bool = False
) -> dict[str, Any]:
    """How a model is run, as plain values. It is loaded for that, and let go.

    `with_operations` adds the operations of each layer in a step, before and after fusion. Raises
    `ModelError` for a model that cannot be found or would not run correctly, `UsageError` for
    settings that do not fit it.
    """
    from cbatch_cli.models.step_observation import CountedKernels, observe_step

    kernels = _load_kernels()
    counted = None if isinstance(kernels, str) else CountedKernels(kernels)
    before: list[StepObservation] = []
    loaded = load_for_engines(
        name,
        config,
        log,
        before_fusion=lambda model: before.append(observe_step(model, counted)),
        kernels=counted,
    )
    model = loaded.model
    facts: dict[str, Any] = {
        "name": loaded.files.name,
        "commit": loaded.files.commit,
        "type": model.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "weight_bytes": model.num_parameter_bytes,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
        "attention_backend": model.attention_backend,
        "attention_layers": _layer_groups(loaded, before[0]),
        "fusion": None if loaded.fusion is None else loaded.fusion.as_dict(),
        "batch_invariant": None if loaded.invariance is None else loaded.invariance.as_dict(),
        "kv_cache": _kv_facts(model, config),
        "load_s": round(loaded.load_s, 2),
    }
    if with_operations:
        facts["operations"] = {
            "before_fusion": _operation_facts(before[0]),
            "after_fusion": _operation_facts(observe_step(model, counted)),
        }
    return facts


def doctor_text(report: Mapping[str, Any]) -> str:
    """The report for people: `environment`, and `model` if one was looked at."""
    lines = _environment_lines(report["environment"])
    if "model" in report and "error" not in report["model"]:
        lines += ["", *_model_lines(report["model"])]
    return "\n".join(lines) + "\n"


def _load_kernels() -> CPUKernels | str:
    """The compiled kernels, or why there are none."""
    from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

    try:
        return load_kernels()
    except KernelsUnavailable as error:
        return str(error)


def _stored_defaults() -> dict[str, Any]:
    """The defaults that were measured on this machine, by precision."""
    return {
        precision: {**dataclasses.asdict(entry.values), "measured_at": entry.measured_at}
        for precision, entry in defaults_of_machine().items()
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu_facts(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return {"name": torch.cuda.get_device_name(index), "free_memory": free, "memory": total}


def _layer_groups(loaded: LoadedModel, observation: StepObservation) -> list[dict[str, Any]]:
    """Runs of layers that follow each other and are alike."""
    layers = [
        {
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "value_head_dim": spec.value_head_dim,
            "window": spec.sliding_window,
            "softcap": softcap,
            "sinks": has_sinks,
        }
        for spec, softcap, has_sinks in zip(
            loaded.model.layer_specs, observation.softcaps, observation.has_sinks, strict=True
        )
    ]
    groups: list[dict[str, Any]] = []
    for shape, run in groupby(layers):
        first = groups[-1]["last"] + 1 if groups else 0
        groups.append({"first": first, "last": first + len(list(run)) - 1, **shape})
    return groups


def _kv_facts(model: HFModel, config: EngineConfig) -> dict[str, Any]:
    """What a token of a long sequence takes, windows kept only and everything kept."""
    from cbatch_cli.engine.kv_cache import kv_cost

    context_len = min(_LONG_CONTEXT, model.max_model_len)
    dtype, block_size = resolve_kv_dtype(model, config), resolve_block_size(model, config)
    cost = kv_cost(model.layer_specs, context_len=context_len, block_size=block_size, dtype=dtype)
    return {
        "dtype": dtype_name(dtype),
        "block_size": block_size,
        "context_len": context_len,
        "bytes_per_token": round(cost.bytes_per_token),
        "uniform_bytes_per_token": round(cost.uniform_bytes_per_token),
    }


def _kv_line(facts: Mapping[str, Any]) -> str:
    kept, uniform = facts["bytes_per_token"], facts["uniform_bytes_per_token"]
    line = (
        f"{facts['dtype']} in blocks of {facts['block_size']}, {kept:,} bytes per token at a "
        f"length of {facts['context_len']:,}"
    )
    return line if kept == uniform else f"{line}; {uniform:,} without windows"


def _operation_facts(observation: StepObservation) -> dict[str, Any]:
    most = max(observation.operations, key=lambda names: sum(names.values()))
    return {
        "per_layer": list(observation.operations_per_layer),
        "of_attention": list(observation.attention_operations),
        "outside_layers": sum(observation.operations_outside.values()),
        "of_the_longest_layer": dict(sorted(most.items())),
    }


def _environment_lines(facts: Mapping[str, Any]) -> list[str]:
    packages = [f"{name} {number or 'missing'}" for name, number in facts["packages"].items()]
    gpus = [
        f"{gpu['name']}, {_size(gpu['free_memory'])} of {_size(gpu['memory'])} free"
        for gpu in facts["gpus"]
    ]
    return _table(
        {
            "python": f"{facts['python']}, {facts['platform']}",
            "packages": ", ".join(packages),
            "device": facts["device"],
            **({"gpus": "; ".join(gpus)} if gpus else {}),
            "threads": f"{facts['threads']} of {facts['cpus']} CPUs",
            "CPU kernels": facts["cpu_kernels"] or f"none: {facts['cpu_kernels_missing']}",
            "defaults": _defaults_text(facts["cpu_defaults"]),
            "free memory": _size(facts["available_memory"]),
        }
    )


def _defaults_text(stored: Mapping[str, Any]) -> str:
    texts = [
        f"{facts['max_num_seqs']} sequences, {facts['max_num_batched_tokens']} tokens a step, "
        f"blocks of {facts['block_size']} with {precision}, measured {facts['measured_at'][:10]}"
        for precision, facts in stored.items()
    ]
    return f"on a CPU {'; '.join(texts)}" if texts else "built in"


def _model_lines(facts: Mapping[str, Any]) -> list[str]:
    commit = f" at {facts['commit']}" if facts["commit"] else ""
    lines = {
        "model": f"{facts['name']}{commit}, type {facts['type']}",
        "weights": f"{_size(facts['weight_bytes'])} of {facts['dtype']} on {facts['device']}",
        "context": f"{facts['max_model_len']:,} tokens",
        "attention": facts["attention_backend"],
        **{_layer_names(group): _shape(group) for group in facts["attention_layers"]},
        **_fusion_lines(facts["fusion"], facts["batch_invariant"]),
        "KV cache": _kv_line(facts["kv_cache"]),
    }
    for when, counts in facts.get("operations", {}).items():
        lines[f"ops {when.replace('_', ' ')}"] = (
            f"{_range(counts['per_layer'])} per layer, of which attention "
            f"{_range(counts['of_attention'])}; {counts['outside_layers']} outside of layers"
        )
    return _table(lines)


def _layer_names(group: Mapping[str, Any]) -> str:
    first, last = group["first"], group["last"]
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _shape(group: Mapping[str, Any]) -> str:
    head_dim, value_head_dim = group["head_dim"], group["value_head_dim"]
    parts = [
        f"{group['num_heads']} heads, {group['num_kv_heads']} of keys and values",
        f"{head_dim} wide" if head_dim == value_head_dim else f"{head_dim}/{value_head_dim} wide",
        f"window {group['window']}" if group["window"] else "sees all",
    ]
    if group["softcap"]:
        parts.append(f"softcap {group['softcap']:g}")
    if group["sinks"]:
        parts.append("sinks")
    return ", ".join(parts)


def _fusion_lines(
    fusion: Mapping[str, Any] | None, invariant: Mapping[str, int] | None
) -> dict[str, str]:
    if invariant is not None:
        counts = f"{invariant['num_linears']} linear layers, {invariant['num_norms']} norms"
        return {"fused": "nothing: --deterministic", "fixed tiles": counts}
    assert fusion is not None
    whole = {"num_found": fusion["num_layers"], **fusion}
    kinds = [f"{count} {kind}" for kind, count in fusion["linear_kinds"].items()]
    return {
        "fused": f"{_counted('layers', whole)}; by {fusion['operations']} operations",
        **{f"fused {kind}": _counted(kind, part) for kind, part in fusion["parts"].items()},
        "linear": ", ".join(kinds) or "all as in transformers",
    }


def _counted(kind: str, facts: Mapping[str, Any]) -> str:
    """How many were fused, and why the others were not."""
    reasons = [f"{count} not, since {why}" for why, count in facts["reasons"].items()]
    return "; ".join([f"{facts['num_fused']} of {facts['num_found']} {kind}", *reasons])


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def _table(lines: Mapping[str, str]) -> list[str]:
    width = max(map(len, lines)) + 2
    return [f"{name:<{width}}{value}" for name, value in lines.items()]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
