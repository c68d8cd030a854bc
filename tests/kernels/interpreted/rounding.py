"""Makes triton's interpreter round the small floats as hardware does.

As it is, the interpreter keeps bfloat16 as integers: products add bits, and casts cut off. Our
kernels compute in float32 except for products of matrices, so casts and `dot` are all there is to
put right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.float32, torch.float32)}


def round_as_hardware_does() -> None:
    """Replace the interpreter's float casts and its `dot`, in this process."""
    cast_anything = InterpreterBuilder.cast_impl

    def cast(self: Any, source: TensorHandle, target: Any, *_: Any) -> TensorHandle:
        if source.dtype.scalar in _TORCH_DTYPES and target.scalar in _TORCH_DTYPES:
            return _convert(source, target.scalar)
        return cast_anything(self, source, target)

    def dot(
        self: Any,
        left: TensorHandle,
        right: TensorHandle,
        start: TensorHandle,
        input_precision: Any,
        max_num_imprecise_acc: Any,
    ) -> TensorHandle:
        product = np.matmul(_convert(left, tl.float32).data, _convert(right, tl.float32).data)
        return TensorHandle(product + start.data, start.dtype.scalar)

    InterpreterBuilder.create_fp_ext = cast
    InterpreterBuilder.create_fp_trunc = cast
    InterpreterBuilder.create_fp_to_fp = cast
    InterpreterBuilder.create_dot = dot


def _convert(source: TensorHandle, target: Any) -> TensorHandle:
    values = _as_torch(source.data, _TORCH_DTYPES[source.dtype.scalar])
    rounded = values.to(_TORCH_DTYPES[target])
    bits = rounded.view(_BITS[rounded.element_size()][1]).numpy()
    if target == tl.bfloat16:
        bits = bits.view(np.uint16)
    elif target == tl.float16:
        bits = bits.view(np.float16)
    return TensorHandle(bits, target)


def _as_torch(data: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    bits = np.ascontiguousarray(data).view(_BITS[dtype.itemsize][0]).reshape(data.shape)
    return torch.from_numpy(bits.copy()).view(dtype)
