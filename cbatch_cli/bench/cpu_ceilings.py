"""What the processors of this machine reach at best, as far as torch and our kernels show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import seconds_per_call
from cbatch_kernels.cpu_packed import GroupedInt8Linear, Int8Linear, PackedLinear

from cbatch_cli.bench.timed_kernels import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class CeilingSizes:
    """How much is measured; as it is, for caches of up to some hundred MB."""

    read_bytes: int = 2**29
    rows: int = 512
    columns: int = 1024
    depth: int = 1024
    """Of the products: both operands stay in a core's cache, panel by panel."""
    num_trials: int = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Rates per second."""

    read_bytes: float
    float32_flops: float
    """Multiplications and additions in float32."""
    w8a16_flops: float
    """Those with weights of 8 bits and activations of 16."""
    w8a8_flops: float
    """Those with weights and activations of 8 bits."""
    float32_by: str = ""
    """Whose product was the fastest."""

    def flops(self, precision: Precision) -> float:
        """Of products of a precision."""
        rates = {
            "float32": self.float32_flops,
            "w8a16": self.w8a16_flops,
            "w8a8": self.w8a8_flops,
        }
        return rates[precision]


def measure_ceilings(kernels: CPUKernels, sizes: CeilingSizes) -> Ceilings:
    """The best of several short trials each, in turn: a neighbour takes some of the time."""
    memory = torch.ones(sizes.read_bytes // 4)
    rows = torch.randn(sizes.rows, sizes.depth)
    weight = torch.randn(sizes.columns, sizes.depth)
    out = torch.empty(sizes.rows, sizes.columns)
    transposed = weight.t()
    packed = PackedLinear(weight, None, kernels)
    rounded = Int8Linear(weight, None, kernels)
    grouped = GroupedInt8Linear(weight, None, kernels)
    best = dict.fromkeys(("read", "packed", "torch", "w8a16", "w8a8"), 0.0)
    flops = 2.0 * sizes.rows * sizes.columns * sizes.depth
    for _ in range(sizes.num_trials):
        rates = {
            "read": memory.nbytes / _seconds(memory.sum),
            "packed": flops / seconds_per_call(packed, rows),
            "torch": flops / _seconds(lambda: torch.mm(rows, transposed, out=out)),
            "w8a16": flops / seconds_per_call(rounded, rows),
            "w8a8": flops / seconds_per_call(grouped, rows),
        }
        best = {name: max(best[name], rate) for name, rate in rates.items()}
    is_ours = best["packed"] >= best["torch"]
    return Ceilings(
        read_bytes=best["read"],
        float32_flops=max(best["packed"], best["torch"]),
        w8a16_flops=best["w8a16"],
        w8a8_flops=best["w8a8"],
        float32_by="our packed product" if is_ours else "torch's product",
    )


def _seconds(run: Callable[[], object]) -> float:
    """The shorter of two calls."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
