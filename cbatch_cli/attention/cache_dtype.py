"""What keys and values are kept in, and where a dtype can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from cbatch_cli.attention.backend import AttentionBackendName
from cbatch_cli.attention.cpu_backend import CACHE_DTYPES
from cbatch_cli.attention.metadata import KVScales
from cbatch_cli.errors import UsageError

KVCacheDtypeName = Literal["auto", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]

_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FIRST_CAPABILITY_WITH_E4M3 = (8, 9)


def choose_cache_dtype(
    name: KVCacheDtypeName,
    backend: AttentionBackendName,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """What a model of `dtype` keeps keys and values in, by its attention backend; auto: `dtype`.

    Raises `UsageError` for what the backend or the device does not have.
    """
    if name == "auto":
        return dtype
    wanted = f"--kv-cache-dtype {name}"
    chosen = _FLOATS.get(name) or _FP8[name]
    if backend == "cpu" and chosen not in CACHE_DTYPES:
        raise UsageError(
            f"{wanted} is not what the compiled CPU kernels have; --attention-backend torch has it"
        )
    if backend == "triton":
        if name in _FLOATS and chosen != dtype:
            short = str(dtype).removeprefix("torch.")
            raise UsageError(f"{wanted} does not go with a {short} model and Triton's attention")
        if name in _FP8 and device.type == "cuda":
            return _fp8_of_device(wanted, chosen, device)
    return chosen


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype holds keys and values over a scale."""
    return dtype.itemsize == 1


def scales_for(dtype: torch.dtype, scales: Mapping[int, KVScales]) -> dict[int, KVScales]:
    """Scales of a checkpoint, which are meant for the usual e4m3, for a cache of `dtype`.

    The e4m3fnuz of some AMD cards holds the same bits as half the number: its scales are twice
    as large.
    """
    factor = 2.0 if dtype == torch.float8_e4m3fnuz else 1.0
    return {
        index: KVScales(k=factor * scale.k, v=factor * scale.v) for index, scale in scales.items()
    }


def _fp8_of_device(wanted: str, chosen: torch.dtype, device: torch.device) -> torch.dtype:
    """The format of eight bits that the card converts to. Raises `UsageError` if it has none."""
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if chosen == torch.float8_e4m3fn and arch.startswith("gfx94"):
            return torch.float8_e4m3fnuz  # what these cards call e4m3
        if chosen == torch.float8_e5m2 and arch.startswith("gfx94"):
            raise UsageError(f"{wanted} is not what {arch} has; fp8_e4m3 is")
        return chosen
    major, minor = torch.cuda.get_device_capability(device)
    if chosen == torch.float8_e4m3fn and (major, minor) < _FIRST_CAPABILITY_WITH_E4M3:
        raise UsageError(f"{wanted} is not what sm_{major}{minor} has; fp8_e5m2 is")
    return chosen
