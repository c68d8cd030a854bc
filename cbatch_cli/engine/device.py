"""A device with a queue of its own: what is submitted runs there while the CPU goes on.

All that the engine does with CUDA directly is in this file.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cbatch_cli.models.devices import on_device


class Ticket(Protocol):
    """Work that was submitted."""

    def wait(self) -> float:
        """Return once the work is done; the seconds that the device took for it."""
        ...


class DeviceQueue(Protocol):
    """Runs work in the order in which it is submitted."""

    def host_bytes(self, num_bytes: int) -> Tensor:
        """uint8 memory on the host that the device copies from and to by itself."""
        ...

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Have `work` done, which uses the device without waiting for it."""
        ...


class Graph(Protocol):
    """Work that was recorded once, to be done again on the same tensors."""

    def replay(self) -> None:
        """Do the work."""
        ...


class GraphCapture(Protocol):
    """Records work as graphs, which share memory for what they compute on the way."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do `work` until all its kernels are there. Raises if it waits for the device."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work` and do nothing of it. Raises whatever keeps it from being recorded."""
        ...


@dataclass(frozen=True, slots=True)
class _CudaTicket:
    start: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> float:
        self.end.synchronize()
        milliseconds: float = self.start.elapsed_time(self.end)
        return milliseconds / 1000.0


class CudaQueue:
    """The current stream of a CUDA or ROCm device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Pinned memory."""
        with on_device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def submit(self, work: Callable[[], None]) -> _CudaTicket:
        """Launch the kernels and copies of `work`."""
        with on_device(self._device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
        return _CudaTicket(start, end)


class CudaGraphCapture:
    """Captures on a stream of its own, as CUDA demands; graphs replay on the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do `work` twice: kernels are compiled, then torch refuses whatever waits."""
        with self._on_stream():
            work()
            with refuse_waiting():
                work()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record `work`; its intermediate results come from the pool of all graphs."""
        gc.collect()  # what is freed while capturing may have to wait for the device
        with self._on_stream():
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                # It ends in an error that says less than the first one.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with on_device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                current.wait_stream(self._stream)


@contextlib.contextmanager
def refuse_waiting() -> Iterator[None]:
    """Have what waits for a CUDA device raise `RuntimeError`, as far as torch knows of it."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch says that it does not know of all that waits.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def cuda_peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Memory that `work` takes on a CUDA device at most, beside what is allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with on_device(device):
        work()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
