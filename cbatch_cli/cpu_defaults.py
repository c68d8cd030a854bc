"""The engine's sizes on a CPU where nobody gives them: built in, or measured on this machine.

What `cbatch bench --suite cpu` found best is kept in a file of its own for every machine, version
and precision, in the folder of converted models. Torch is loaded with the kernels alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch_cli import __version__
from cbatch_cli.models.gguf_cache import cache_root

CHOICES: Mapping[str, tuple[int, ...]] = {
    "max_num_batched_tokens": (128, 256, 512),
    "max_num_seqs": (32, 64),
    "block_size": (16, 64),
}
"""What is measured and may be stored, by the name of the engine's setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUDefaults:
    """Settings of the engine under their names there. Raises `ValueError` for no such choice."""

    max_num_batched_tokens: int = 256
    max_num_seqs: int = 32
    block_size: int = 64

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if type(value) is not int or value not in choices:
                known = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {known}, not {value!r}")

    def __str__(self) -> str:
        return (
            f"{self.max_num_seqs} sequences, {self.max_num_batched_tokens} tokens a step, blocks "
            f"of {self.block_size}"
        )


BUILT_IN = CPUDefaults()


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultsKey:
    """What measured defaults hold for."""

    processor: str
    num_cpus: int
    num_threads: int
    kernels: str
    """The variant of the compiled kernels."""
    cbatch_version: str
    precision: str
    """Of the weights, and of keys and values."""

    @property
    def path(self) -> Path:
        """The file of these defaults, whether it exists or not."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDefaults:
    """What was measured to be best."""

    values: CPUDefaults
    speedup: float
    """Over the built-in defaults, on the workload that was measured."""
    measured_at: str
    """Local time, ISO 8601."""


def key_for(*, quantization: str, dtype: str, kv_dtype: str) -> DefaultsKey:
    """The key of this machine and version for what is computed in, where kernels are installed."""
    weights = dtype if quantization == "none" else quantization
    return _key(f"{weights}, keys and values in {kv_dtype}")


def defaults_for(
    *, quantization: str, dtype: str, kv_dtype: str, log: Callable[[str], None]
) -> CPUDefaults:
    """What was measured here for this precision, else what is built in."""
    key = key_for(quantization=quantization, dtype=dtype, kv_dtype=kv_dtype)
    stored = read_defaults(key, log)
    return BUILT_IN if stored is None else stored.values


def read_defaults(key: DefaultsKey, log: Callable[[str], None]) -> StoredDefaults | None:
    """What was stored for `key`; a file that cannot be meant is told of and ignored."""
    # Even finding the folder can fail, for somebody without a home.
    try:
        path = key.path
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as error:
        log(f"measured defaults are ignored, since their file cannot be read: {error}")
        return None
    try:
        if data["for"] != dataclasses.asdict(key):
            raise ValueError("it was measured for something else")
        return _parsed(data)
    except (KeyError, TypeError, ValueError) as error:
        log(f"{path} is ignored, since it holds no measured defaults: {error}")
        return None


def store_defaults(key: DefaultsKey, values: CPUDefaults, *, speedup: float) -> Path:
    """Keep `values` as the defaults for `key`; returns the file. Raises `OSError`."""
    path = key.path
    data = {
        "for": dataclasses.asdict(key),
        "values": dataclasses.asdict(values),
        "speedup": round(speedup, 3),
        "measured_at": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
        os.replace(scratch, path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
    return path


def forget_defaults(key: DefaultsKey) -> bool:
    """Go back to the built-in defaults for `key`; whether others were stored."""
    was_stored = key.path.exists()
    key.path.unlink(missing_ok=True)
    return was_stored


def defaults_of_machine() -> dict[str, StoredDefaults]:
    """What is stored for this machine and version, by precision."""
    found = {}
    try:
        paths = sorted(_folder().glob("*.json"))
    except (OSError, RuntimeError):
        return {}
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            key = _key(data["for"]["precision"])
            if key.path == path and data["for"] == dataclasses.asdict(key):
                found[key.precision] = _parsed(data)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            continue  # a run that would use it says so
    return found


def _key(precision: str) -> DefaultsKey:
    from cbatch_kernels.cpu_library import load_kernels, num_threads

    return DefaultsKey(
        processor=_processor_name(),
        num_cpus=os.cpu_count() or 1,
        num_threads=num_threads(),
        kernels=load_kernels().variant,
        cbatch_version=__version__,
        precision=precision,
    )


def _folder() -> Path:
    return cache_root() / "cpu-defaults"


def _parsed(data: Mapping[str, Any]) -> StoredDefaults:
    return StoredDefaults(
        values=CPUDefaults(**data["values"]),
        speedup=float(data["speedup"]),
        measured_at=str(data["measured_at"]),
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
