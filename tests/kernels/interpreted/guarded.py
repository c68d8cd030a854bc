"""Tensors behind which no memory is: one number read too many ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy that ends where an unreadable page begins."""
    num_bytes = tensor.numel() * tensor.element_size()
    readable = -(-num_bytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, readable + _PAGE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + readable
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(_PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=readable - num_bytes
    )
    return copy.view(tensor.shape).copy_(tensor)
