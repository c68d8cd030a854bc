"""Compiled kernels and attention that note how long each call took, and what it computed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_packed import GroupedInt8Linear
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec

_SETUP = (
    *("pack_linear", "bits_beyond_bfloat16", "pack_linear_bfloat16"),
    *("round_int8", "pack_int8", "pack_int8_groups"),
)
"""These run once, when a model is loaded or a head is first asked for."""

ATTENTION = "attention"

Precision = Literal["float32", "w8a16", "w8a8"]
"""What a product multiplies: float32, in whatever weights are kept, or weights of 8 bits by
activations of 16 or of 8."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a call computes, and the least that it reads from memory.

    Bytes are those of weights and of cached keys and values: what a step computes on its way fits
    into caches.
    """

    flops: int = 0
    """Multiplications and additions, each counted."""
    num_bytes: int = 0
    precision: Precision = "float32"
    num_columns: int = 0
    """Of a product: values in a row of its output."""
    depth: int = 0
    """Of a product: values of a row of its input."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel."""

    step: int
    kernel: str
    seconds: float
    work: Work
    sampled: Work | None = None
    """What is left of it where the last layer computes only the rows that sample; None: all."""


class CallRecorder:
    """Takes calls down while it is on. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.calls: list[Call] = []
        self.sample_indices: Sequence[int] = ()
        """The tokens of the step, by their places in the pack, that sample."""
        self.only_samples = False
        """Whether no other rows are needed from now on in the step."""
        self._is_on = False
        self._step = 0

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Forget what was noted, and note the calls of the block; they stay in the list."""
        self.calls, self._step, self._is_on, self.only_samples = [], 0, True, False
        try:
            yield self.calls
        finally:
            self._is_on = False

    def begin_step(self) -> None:
        """Calls from now on belong to the next step."""
        self._step += 1
        self.only_samples = False

    def add(
        self, kernel: str, start: float, end: float, work: Work, sampled: Work | None = None
    ) -> None:
        """A call from `start` to `end` by the clock."""
        if self._is_on:
            self.calls.append(Call(self._step, kernel, end - start, work, sampled))


class TimedKernels:
    """In place of `CPUKernels`: every call is told to the recorder."""

    def __init__(self, kernels: CPUKernels, recorder: CallRecorder) -> None:
        self.variant, self.panel = kernels.variant, kernels.panel
        self._recorder = recorder
        for name, function in vars(kernels).items():
            if name not in ("variant", "panel"):
                is_timed = name not in _SETUP
                setattr(self, name, self._timed(name, function) if is_timed else function)

    def _timed(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        recorder, clock = self._recorder, self._recorder.clock
        work_of = _WORK.get(name)

        def timed(*args: Any) -> None:
            start = clock()
            function(*args)
            end = clock()
            if work_of is None:
                recorder.add(name, start, end, Work())
                return
            work, sampled = work_of(args), None
            if recorder.only_samples:
                num_rows = min(args[_NUM_ROWS], len(recorder.sample_indices))
                sampled = work_of((*args[:_NUM_ROWS], num_rows, *args[_NUM_ROWS + 1 :]))
            recorder.add(name, start, end, work, sampled)

        return timed


class TimedBackend:
    """An attention backend that is timed.

    It is no `CPUAttentionBackend`, so that fused layers go step by step and call each kernel by
    itself. `itemsize` is of the cached keys and values, in bytes; `last_layer` is the index of the
    attention layer that runs last.
    """

    def __init__(
        self, backend: AttentionBackend, recorder: CallRecorder, *, itemsize: int, last_layer: int
    ) -> None:
        self._backend, self._recorder, self._itemsize = backend, recorder, itemsize
        self._last_layer = last_layer
        self._metadata: Sequence[AttentionMetadata] = ()

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """As the backend does."""
        self._recorder.begin_step()
        self._metadata = metadata
        self._backend.begin_step(metadata)

    def forward(self, layer: LayerSpec, *states: Tensor, **options: Any) -> Tensor:
        """As the backend does."""
        start = self._recorder.clock()
        output = self._backend.forward(layer, *states, **options)
        end = self._recorder.clock()
        step = self._metadata[layer.group]
        query_lens, seq_lens = step.query_lens_cpu, step.seq_lens_cpu
        work = attention_work(layer, query_lens, seq_lens, itemsize=self._itemsize)
        sampled = None
        if layer.index == self._last_layer:
            kept = sampled_lens(query_lens, seq_lens, self._recorder.sample_indices)
            sampled = attention_work(layer, *kept, itemsize=self._itemsize)
            self._recorder.only_samples = True
        self._recorder.add(ATTENTION, start, end, work, sampled)
        return output


def sampled_lens(
    query_lens: Sequence[int], seq_lens: Sequence[int], sample_indices: Sequence[int]
) -> tuple[list[int], list[int]]:
    """`query_lens` and `seq_lens` of the sequences that sample, from the first token that does."""
    kept_query_lens, kept_seq_lens = [], []
    end = 0
    for new, length in zip(query_lens, seq_lens, strict=True):
        start, end = end, end + new
        first = min((index for index in sample_indices if start <= index < end), default=end)
        if first < end:
            kept_query_lens.append(end - first)
            kept_seq_lens.append(length)
    return kept_query_lens, kept_seq_lens


def attention_work(
    layer: LayerSpec, query_lens: Sequence[int], seq_lens: Sequence[int], *, itemsize: int
) -> Work:
    """Of the last `query_lens` positions of sequences that are then `seq_lens` long.

    A position attends to itself and to those before it, within the window.
    """
    num_scores = num_positions = 0
    for new, length in zip(query_lens, seq_lens, strict=True):
        window = min(layer.sliding_window or length, length)
        # Positions that see fewer than the window come first.
        first = length - new
        num_growing = max(0, min(window - first, new))
        num_scores += num_growing * (2 * first + num_growing + 1) // 2
        num_scores += (new - num_growing) * window
        num_positions += min(length, window + new - 1)
    head_dims = layer.head_dim + layer.value_head_dim
    return Work(
        flops=2 * num_scores * layer.num_heads * head_dims,
        num_bytes=num_positions * layer.num_kv_heads * head_dims * itemsize,
    )


_NUM_ROWS = 2
"""Which argument of a product is the number of its rows."""


def _linear_work(args: tuple[Any, ...], itemsize: int = 4) -> Work:
    rows, depth, columns = args[_NUM_ROWS], args[3], args[6]
    return Work(
        flops=2 * rows * depth * columns,
        num_bytes=itemsize * depth * columns if rows else 0,
        num_columns=columns,
        depth=depth,
    )


def _bfloat16_work(args: tuple[Any, ...]) -> Work:
    return _linear_work(args, itemsize=2)


def _int8_work(args: tuple[Any, ...]) -> Work:
    rows, depth, columns = args[_NUM_ROWS], args[3], args[7]
    return Work(
        flops=2 * rows * depth * columns,
        num_bytes=depth * columns if rows else 0,
        precision="w8a16",
        num_columns=columns,
        depth=depth,
    )


def _grouped_int8_work(args: tuple[Any, ...]) -> Work:
    work = _linear_work(args)
    groups = -(-work.depth // GroupedInt8Linear.group)
    num_bytes = (work.depth + 8 * groups) * work.num_columns if work.num_bytes else 0
    return dataclasses.replace(work, precision="w8a8", num_bytes=num_bytes)


# What the search for the largest logit computes in float32 beside its 8-bit product is little.
_WORK = {
    "linear": _linear_work,
    "linear_bfloat16": _bfloat16_work,
    "linear_int8": _int8_work,
    "largest_int8": _int8_work,
    "linear_int8_groups": _grouped_int8_work,
    "largest_int8_groups": _grouped_int8_work,
}
