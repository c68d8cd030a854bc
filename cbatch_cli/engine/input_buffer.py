"""Copies all arrays of a step to the device at once, and never over one that is still needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: Triton loads 128 bits at once from what begins at a multiple of this."""

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Where an array lies in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Packet:
    """Arrays that lie in host memory, one after another."""

    turn: int
    parts: Mapping[str, Part]

    @property
    def num_bytes(self) -> int:
        """From the beginning of the buffer to the end of the last array."""
        return max((part.end for part in self.parts.values()), default=0)


def pack(arrays: Mapping[str, NDArray[Any]], turn: int) -> Packet:
    """Where arrays go, which depends on their order, shapes and types alone."""
    parts = {}
    end = 0
    for name, array in arrays.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        parts[name] = Part(offset, array.shape, _DTYPES[array.dtype])
        end = parts[name].end
    return Packet(turn, parts)


class InputBuffer:
    """Memory on the device for the inputs of one step, and on the host for `num_turns` of them.

    The device works on steps one after another, so its memory is written for a step when the one
    before it is done; the host's is read by the device at any time until then. With `may_grow`
    the memory is replaced by more when that is needed; else it stays where it is, for graphs.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        device: torch.device,
        host_bytes: Callable[[int], Tensor],
        num_turns: int,
        may_grow: bool = False,
    ) -> None:
        self._host_bytes = host_bytes
        self._may_grow = may_grow
        self._host = [host_bytes(num_bytes) for _ in range(num_turns)]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def fill(self, arrays: Mapping[str, NDArray[Any]], turn: int) -> Packet:
        """Write `arrays` to the host memory of this turn, which nothing uses any more.

        Raises `ValueError` for more than fits into memory that may not grow.
        """
        packet = pack(arrays, turn)
        if packet.num_bytes > len(self._host[turn]):
            if not self._may_grow:
                raise ValueError(
                    f"a step's inputs take {packet.num_bytes} bytes, but there is room for "
                    f"{len(self._host[turn])}"
                )
            self._host[turn] = self._host_bytes(2 * packet.num_bytes)
        memory = self._host[turn].numpy()
        for array, part in zip(arrays.values(), packet.parts.values(), strict=True):
            memory[part.offset : part.end].view(array.dtype).reshape(array.shape)[...] = array
        return packet

    def send(self, packet: Packet) -> dict[str, Tensor]:
        """Copy what `fill` has written to the device; the arrays there, valid until the next."""
        num_bytes = packet.num_bytes
        if num_bytes > len(self._device):
            self._device = self._device.new_empty(2 * num_bytes)
        self._device[:num_bytes].copy_(self._host[packet.turn][:num_bytes], non_blocking=True)
        return self.views(packet)

    def views(self, packet: Packet) -> dict[str, Tensor]:
        """The arrays of a packet as they lie on the device."""
        return {
            name: self._device[part.offset : part.end].view(part.dtype).view(part.shape)
            for name, part in packet.parts.items()
        }
