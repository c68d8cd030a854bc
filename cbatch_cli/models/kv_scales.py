"""What a checkpoint says about the scales of keys and values in a cache of eight bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from cbatch_cli.attention.metadata import KVScales
from cbatch_cli.errors import ModelError
from cbatch_cli.models.weight_files import tensor_files

# As the tools that calibrate them name them, behind the name of the attention layer.
_K_NAMES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_V_NAMES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
_SUFFIXES = ("_scale", ".output_scale")


def read_kv_scales(folder: Path, layer_names: Mapping[int, str]) -> dict[int, KVScales]:
    """The scales of each attention layer by its index; layers without any are left out.

    `layer_names` are the layers' names in the model. Raises `ModelError` for a scale that is no
    positive number, and for scales of single heads.
    """
    files = {name: path for name, path in tensor_files(folder).items() if name.endswith(_SUFFIXES)}
    if not files:
        return {}
    scales = {}
    for index, layer in layer_names.items():
        k = _read(files, layer, _K_NAMES)
        v = _read(files, layer, _V_NAMES)
        if k is not None or v is not None:
            scales[index] = KVScales(k=1.0 if k is None else k, v=1.0 if v is None else v)
    return scales


def _read(files: Mapping[str, Path], layer: str, names: tuple[str, ...]) -> float | None:
    for name in names:
        # A base model is stored without the prefix that it has inside of a larger one.
        for stored in (f"{layer}.{name}", f"{layer}.{name}".partition(".")[2]):
            if stored in files:
                return _scale(files[stored], stored)
    return None


def _scale(path: Path, name: str) -> float:
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    if tensor.numel() != 1:
        raise ModelError(f"{path}: {name} has a scale for each head, which is not supported")
    scale = float(tensor)
    if not (math.isfinite(scale) and scale > 0):
        raise ModelError(f"{path}: {name} is {scale}, which is no scale")
    return scale
