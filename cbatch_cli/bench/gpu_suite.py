"""What a GPU reaches, and how near cbatch comes to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cbatch_cli.bench.device_clock import copy_bandwidth, matmul_rate
from cbatch_cli.bench.suite import Log, Measurement, Section, SuiteSettings
from cbatch_cli.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUSizes:
    """How much is measured; as it is, for a card of 80 GiB and more."""

    copy_bytes: int = 2**31
    matmul_size: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the card was seen to reach."""

    bytes_per_s: float
    flops_per_s: float


def measure(settings: SuiteSettings, log: Log) -> Iterator[Section]:
    """Sections as they are measured. Raises `UsageError` without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("--suite gpu needs a GPU, and torch finds none on this machine")
    yield from measure_on(torch.device("cuda"), settings, log, sizes=GPUSizes())


def measure_on(
    device: torch.device, settings: SuiteSettings, log: Log, *, sizes: GPUSizes
) -> Iterator[Section]:
    """The suite on a device, as large as `sizes` say."""
    ceilings = Ceilings(
        bytes_per_s=copy_bandwidth(device, sizes.copy_bytes),
        flops_per_s=matmul_rate(device, sizes.matmul_size, torch.bfloat16),
    )
    yield Section(
        title=f"Ceilings of {_name_of(device)}",
        measurements=[
            Measurement(name="copy", value=ceilings.bytes_per_s / 1e9, unit="GB/s"),
            Measurement(name="bf16 product", value=ceilings.flops_per_s / 1e12, unit="TFLOP/s"),
        ],
    )


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
