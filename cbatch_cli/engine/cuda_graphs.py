"""Decoding steps recorded as graphs: one launch in place of hundreds.

A graph's tensors and grids are those of its recording. So there is one for each of some numbers of
sequences, and a step takes the next larger one, filled up with rows of no length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

from cbatch_cli.engine.device import Graph, GraphCapture


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to the most sequences that run at once, and that number itself."""
    powers = (1 << exponent for exponent in range((max_num_seqs - 1).bit_length()))
    return (*powers, max_num_seqs)


class DecodeGraphs:
    """A graph of `decode(size)` for each of `sizes`.

    The largest is recorded first: those that follow fit into the memory that it took. Before each
    is warmed up and recorded, `prepare(size)` is called to put something harmless into the inputs.
    Raises whatever keeps `decode` from being recorded.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        prepare: Callable[[int], None],
        decode: Callable[[int], None],
        capture: GraphCapture,
    ) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, Graph] = {}
        for size in reversed(self._sizes):
            work = partial(decode, size)
            prepare(size)
            capture.warm_up(work)
            self._graphs[size] = capture.capture(work)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of sequences, in order."""
        return tuple(self._sizes)

    def size_for(self, num_seqs: int) -> int | None:
        """The smallest size that holds so many sequences; None for more than any does."""
        index = bisect_left(self._sizes, num_seqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Do the work that was recorded for `size`, on the inputs as they are now."""
        self._graphs[size].replay()
