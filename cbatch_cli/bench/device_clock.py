"""How long a device takes for something, and what it reaches at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_NUM_ROUNDS = 5


def seconds_of(run: Callable[[], object], device: torch.device, *, num_calls: int = 10) -> float:
    """The time of one `run` on the device: the median of rounds of `num_calls` in a row.

    In a row, so that a device does not wait for the host between calls.
    """
    _round(run, device, num_calls)  # what is compiled or set up once does not count
    rounds = [_round(run, device, num_calls) for _ in range(_NUM_ROUNDS)]
    return median(rounds) / num_calls


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy on the device, those read and those written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of square matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    output = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=output), device)


def _round(run: Callable[[], object], device: torch.device, num_calls: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(num_calls):
            run()
        return time.perf_counter() - start
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
