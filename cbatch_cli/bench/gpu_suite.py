"""What a GPU reaches, and how near cbatch comes to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cbatch_cli.bench.device_clock import copy_bandwidth, matmul_rate
from cbatch_cli.bench.gpu_engine import EngineSizes, engine_measurements
from cbatch_cli.bench.gpu_kernels import AttentionSizes, decode_rate, kernel_errors, prefill_rate
from cbatch_cli.bench.suite import Log, Measurement, Section, SuiteSettings
from cbatch_cli.config import DEMO_MODEL
from cbatch_cli.engine_setup import dtype_name
from cbatch_cli.errors import UsageError
from cbatch_cli.models.devices import on_device, resolve_device
from cbatch_cli.models.random_models import SHAPES


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUSizes:
    """How much is measured; as it is, for a card of 80 GiB and more."""

    copy_bytes: int = 2**31
    matmul_size: int = 8192
    head_dims: tuple[int, ...] = (64, 128, 256)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    attention: AttentionSizes = field(default_factory=AttentionSizes)
    num_decodes: int = 64
    context_len: int = 2048
    prompt_len: int = 4096
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: SHAPES)
    engine: EngineSizes = field(default_factory=EngineSizes)


def measure(settings: SuiteSettings, log: Log) -> Iterator[Section]:
    """Sections as they are measured. Raises `UsageError` without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("--suite gpu needs a GPU, and torch finds none on this machine")
    if settings.model != DEMO_MODEL:
        raise UsageError("--suite gpu makes models of its own, so --model says nothing to it")
    device = resolve_device(settings.engine.device)
    with on_device(device):
        yield from measure_on(device, settings, log, sizes=GPUSizes())


def measure_on(
    device: torch.device, settings: SuiteSettings, log: Log, *, sizes: GPUSizes
) -> Iterator[Section]:
    """The suite on a device, as large as `sizes` say."""
    engine = settings.engine
    dtype = torch.bfloat16 if engine.dtype == "auto" else getattr(torch, engine.dtype)
    bytes_per_s = copy_bandwidth(device, sizes.copy_bytes)
    flops_per_s = matmul_rate(device, sizes.matmul_size, dtype)
    yield Section(
        title=f"Ceilings of {_name_of(device)}",
        measurements=[
            Measurement(name="copy", value=bytes_per_s / 1e9, unit="GB/s"),
            Measurement(
                name=f"{dtype_name(dtype)} product", value=flops_per_s / 1e12, unit="TFLOP/s"
            ),
        ],
    )
    yield Section(
        title="Kernels against float64",
        measurements=list(kernel_errors(device, sizes.dtypes, head_dims=sizes.head_dims)),
    )
    yield _attention(device, sizes, dtype, bytes_per_s, flops_per_s)
    for name, shape in sizes.shapes.items():
        yield Section(
            title=f"{name} in {dtype_name(dtype)}, random weights",
            measurements=list(
                engine_measurements(
                    shape,
                    engine,
                    device=device,
                    dtype=dtype,
                    bytes_per_s=bytes_per_s,
                    repeat=settings.repeat,
                    sizes=sizes.engine,
                    log=log,
                )
            ),
        )


def _attention(
    device: torch.device,
    sizes: GPUSizes,
    dtype: torch.dtype,
    bytes_per_s: float,
    flops_per_s: float,
) -> Section:
    """Attention beside what the card was seen to reach."""
    shape = sizes.attention
    decoded = decode_rate(
        shape,
        device=device,
        num_seqs=sizes.num_decodes,
        context_len=sizes.context_len,
        dtype=dtype,
    )
    filled = prefill_rate(shape, device=device, prompt_len=sizes.prompt_len, dtype=dtype)
    decodes = f"decode, {sizes.num_decodes} x {sizes.context_len:,} positions"
    prompt = f"prompt of {sizes.prompt_len:,}"
    return Section(
        title=f"Attention, {shape.num_kv_heads * shape.group_size} heads, {shape.num_kv_heads} of "
        f"keys and values, {shape.head_dim} wide",
        measurements=[
            Measurement(name=decodes, value=decoded / 1e9, unit="GB/s"),
            Measurement(
                name=f"{decodes}, of the copy", value=decoded / bytes_per_s, unit="%", target=0.75
            ),
            Measurement(name=prompt, value=filled / 1e12, unit="TFLOP/s"),
            Measurement(
                name=f"{prompt}, of the product", value=filled / flops_per_s, unit="%", target=0.55
            ),
        ],
    )


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
