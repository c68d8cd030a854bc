"""Loads the compiled CPU kernels and describes their C interface.

The library holds every kernel once per instruction set; `CPUKernels` are the functions of one.
All arrays are passed as addresses, so callers must keep the tensors alive during a call.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

# Imported before the library, which takes OpenMP from the runtime that torch loads.
import torch
from numpy.typing import NDArray

LIBRARY_FOLDER = Path(__file__).parent
_LIBRARY_NAME = "cpu_kernels"
_INTERFACE_VERSION = 9

# Panel width and with it the packed layout differ by variant, so weights packed by one variant
# must be multiplied by the same one.
_PANELS = {"generic": 8, "avx2": 16, "avx512": 32}
_FEATURES = {"generic": 0, "avx2": 1, "avx512": 2}

# p: address, i: int64, f: float32.
_SIGNATURES = {
    "attention": "p",
    "decoder_layer": "p",
    "add_norm": "ppfppfpiii",
    "norm_rope": "piiiiippfppii",
    "activate_and_multiply": "ppiiii",
    "pack_linear": "piipi",
    "linear": "piiippipii",
    "pack_linear_bfloat16": "piippi",
    "linear_bfloat16": "piiippipii",
    "bits_beyond_bfloat16": "pipi",
    "round_int8": "piiippipi",
    "pack_int8": "piipi",
    "linear_int8": "piiipppiipii",
    "largest_int8": "piiipppiipppi",
    "largest_int8_groups": "piiippipppfpppi",
    "pack_int8_groups": "piipppi",
    "linear_int8_groups": "piiippipii",
    "row_maxima": "piiipppi",
    "exponential_sums": "piiipppi",
    "top_logits": "piiippippi",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class KernelsUnavailable(Exception):
    """The compiled kernels are missing or do not fit; the message says why."""


class AttentionArguments(ctypes.Structure):
    """`CbatchAttention` of kernels/cpu/attention.h, field by field."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("key", ctypes.c_void_p),
        ("key_token_stride", ctypes.c_int64),
        ("key_head_stride", ctypes.c_int64),
        ("value", ctypes.c_void_p),
        ("value_token_stride", ctypes.c_int64),
        ("value_head_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("k_block_stride", ctypes.c_int64),
        ("k_slot_stride", ctypes.c_int64),
        ("k_head_stride", ctypes.c_int64),
        ("v_cache", ctypes.c_void_p),
        ("v_block_stride", ctypes.c_int64),
        ("v_slot_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
        ("block_tables", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("first_queries", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("cache_is_bfloat16", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    ]


class WeightFormat(enum.IntEnum):
    """`CbatchWeightFormat` of kernels/cpu/layer.h."""

    FLOAT32 = 0
    INT8 = 1
    INT8_GROUPS = 2
    BFLOAT16 = 3


class LinearArguments(ctypes.Structure):
    """`CbatchLinear` of kernels/cpu/layer.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("format", ctypes.c_int64),
    ]


class NormArguments(ctypes.Structure):
    """`CbatchNorm` of kernels/cpu/layer.h."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class LayerArguments(ctypes.Structure):
    """`CbatchLayer` of kernels/cpu/layer.h, field by field."""

    _fields_ = [
        ("hidden_states", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("input_norm", NormArguments),
        ("query_norm", NormArguments),
        ("key_norm", NormArguments),
        ("post_attention_norm", NormArguments),
        ("pre_mlp_norm", NormArguments),
        ("post_mlp_norm", NormArguments),
        ("qkv", LinearArguments),
        ("output", LinearArguments),
        ("gate_up", LinearArguments),
        ("down", LinearArguments),
        ("attention", AttentionArguments),
    ]


def _columns(structure: type[ctypes.Structure]) -> dict[str, int]:
    return {field[0]: getattr(structure, field[0]).offset // 8 for field in structure._fields_}


ATTENTION_COLUMNS = _columns(AttentionArguments)
LAYER_COLUMNS = _columns(LayerArguments)
"""The word of 64 bits in which a field begins; fields of 32 bits lie two in a word."""


def as_words(structures: Any) -> NDArray[np.int64]:
    """A ctypes array of n structures as int64 `[n, words]` over the same memory."""
    return np.frombuffer(structures, dtype=np.int64).reshape(len(structures), -1)


class CPUKernels:
    """The functions of one variant, named as in kernels/cpu without their suffix."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.variant = variant
        self.panel = _PANELS[variant]
        """Output columns per panel of packed weights."""
        for name, signature in _SIGNATURES.items():
            function = getattr(library, f"cbatch_{name}_{variant}")
            function.argtypes = [_TYPES[letter] for letter in signature]
            function.restype = None
            setattr(self, name, function)

    attention: Callable[..., None]
    decoder_layer: Callable[..., None]
    add_norm: Callable[..., None]
    norm_rope: Callable[..., None]
    activate_and_multiply: Callable[..., None]
    pack_linear: Callable[..., None]
    linear: Callable[..., None]
    pack_linear_bfloat16: Callable[..., None]
    linear_bfloat16: Callable[..., None]
    bits_beyond_bfloat16: Callable[..., None]
    round_int8: Callable[..., None]
    pack_int8: Callable[..., None]
    linear_int8: Callable[..., None]
    largest_int8: Callable[..., None]
    largest_int8_groups: Callable[..., None]
    pack_int8_groups: Callable[..., None]
    linear_int8_groups: Callable[..., None]
    row_maxima: Callable[..., None]
    exponential_sums: Callable[..., None]
    top_logits: Callable[..., None]


def supported_variants() -> tuple[str, ...]:
    """What this processor can run, the fastest last. Raises `KernelsUnavailable`."""
    library = _library(LIBRARY_FOLDER)
    features = library.cbatch_processor_features()
    return tuple(
        name
        for name, feature in _FEATURES.items()
        if features & feature == feature and hasattr(library, f"cbatch_attention_{name}")
    )


def load_kernels(variant: str | None = None) -> CPUKernels:
    """The kernels of `variant`, or of the fastest one that this processor runs.

    Raises `KernelsUnavailable` if the library was not built, does not load, or is out of date.
    """
    variants = supported_variants()
    if variant is not None and variant not in variants:
        raise KernelsUnavailable(f"this processor does not run the variant {variant}")
    return CPUKernels(_library(LIBRARY_FOLDER), variant or variants[-1])


@functools.lru_cache(maxsize=8)
def _library(folder: Path) -> ctypes.CDLL:
    paths = [folder / (_LIBRARY_NAME + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise KernelsUnavailable("the CPU kernels were not built; a C++ compiler builds them")
    try:
        library = ctypes.CDLL(str(path))
        version = library.cbatch_interface_version()
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"the CPU kernels do not load: {error}") from None
    if version != _INTERFACE_VERSION:
        raise KernelsUnavailable("the CPU kernels are out of date; install the package again")
    return library


def num_threads() -> int:
    """Threads that a kernel may use: as many as torch does."""
    return torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> Any:
    """Where a tensor's values start; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()
