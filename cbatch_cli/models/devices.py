"""Which device a model runs on, and that it is the current one while the model does."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from cbatch_cli.errors import UsageError


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is the first GPU where there is one.

    Raises `UsageError` for a GPU that is not there.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not has_gpu:
        raise UsageError(f"device {name} asked for, but this machine has no usable GPU")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"device {name} asked for, but this machine has {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", index)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current one of this thread, if it is a GPU.

    Triton compiles for and launches on the current device, whatever device its tensors are on, and
    pinned memory belongs to it; torch's own operations go where their tensors are.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    current: AbstractContextManager[None] = torch.cuda.device(device)
    return current
