"""Checks of arguments: a kernel that is given a wrong tensor reads memory of others."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


class Shapes:
    """Letters for sizes: the first tensor that has a letter fixes it for all that follow."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, str]] = {}
        self._device: tuple[torch.device, str] | None = None

    def check(self, name: str, tensor: Tensor, layout: str) -> None:
        """Compare a tensor with its layout, such as "T H D"; its last dimension is contiguous."""
        letters = layout.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(letters):
            raise ValueError(f"{name} has shape {list(shape)}; it should be [{', '.join(letters)}]")
        for letter, size in zip(letters, shape, strict=True):
            known, owner = self._sizes.setdefault(letter, (size, name))
            if known != size:
                raise ValueError(
                    f"{name} has shape {list(shape)}; in [{', '.join(letters)}] {letter} should be "
                    f"{known} as in {owner}"
                )
        if shape and shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; it should be 1"
            )
        device, owner = self._device = self._device or (tensor.device, name)
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but {owner} is on {device}")

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter][0]


def check_dtype(name: str, tensor: Tensor, allowed: Collection[torch.dtype]) -> None:
    """Raise `ValueError` unless the tensor's dtype is among the allowed ones."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} has dtype {found}; it should be {names}")


def check_positive(name: str, number: float | None) -> None:
    """Raise `ValueError` unless a number is absent or above 0."""
    if number is not None and not number > 0:
        raise ValueError(f"{name} is {number}; it should be above 0")
