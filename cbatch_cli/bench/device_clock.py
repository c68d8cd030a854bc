"""How long a device takes for something, and what it reaches at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_MIN_RUNS, _MAX_RUNS = 5, 200
_NUM_WARM_UPS = 3


def seconds_of(run: Callable[[], object], device: torch.device, *, at_most_s: float = 1.0) -> float:
    """The median time of `run` on the device, after runs that do not count.

    It is run for about `at_most_s` seconds, or a few times if that takes longer.
    """
    for _ in range(_NUM_WARM_UPS):
        run()
    _synchronize(device)
    first = _timed(run, device)
    num_runs = int(at_most_s / max(first, 1e-9))
    return median(_timed(run, device) for _ in range(min(max(num_runs, _MIN_RUNS), _MAX_RUNS)))


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


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
