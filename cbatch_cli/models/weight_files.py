"""Safetensors files: whether all of them are there and whole, told before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch_cli.errors import ModelError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_LENGTH_BYTES = 8
_GIT_LFS_POINTER = b"version https://git-lfs"


def check_weight_files(folder: Path, name: str) -> None:
    """Check the weights of the model `name` in a folder, as far as their headers tell.

    Raises `ModelError` naming the file that is missing, cut short, damaged or not safetensors,
    or the tensor that a file lacks.
    """
    paths = sorted(folder.iterdir())
    if not any(path.suffix == ".safetensors" for path in paths):
        pickled = [path.name for path in paths if path.suffix in _PICKLE_SUFFIXES]
        if pickled:
            raise ModelError(
                f"{name} has pickled weights only ({pickled[0]}), which can run code and are not "
                "opened; convert them to safetensors"
            )
        raise ModelError(f"{name} has no safetensors weights")
    for path, tensors in _tensors_by_file(folder).items():
        header = _read_header(path)
        if missing := sorted(tensors - header.keys()):
            raise ModelError(f"{path} lacks the tensor {missing[0]}, which the index says it holds")


def file_of_tensor(folder: Path, tensor: str) -> Path | None:
    """The file that holds a tensor of the loaded model; None where names do not tell."""
    for path in _tensors_by_file(folder):
        for stored in _read_header(path):
            # A base model is stored without the prefix that it has inside of a larger one.
            if f".{stored}".endswith(f".{tensor}") or f".{tensor}".endswith(f".{stored}"):
                return path
    return None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Every stored tensor by its name, with the file that holds it."""
    return {name: path for path in _tensors_by_file(folder) for name in _read_header(path)}


def _tensors_by_file(folder: Path) -> dict[Path, set[str]]:
    """The files that transformers would read, in its order, with the tensors the index wants."""
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if os.path.lexists(single):  # also a link to a file that is gone
        return {single: set()}
    if not index.exists():
        return {}
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        files: dict[Path, set[str]] = {}
        for tensor, file_name in weight_map.items():
            files.setdefault(folder / file_name, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    return files


def _read_header(path: Path) -> dict[str, Any]:
    """The tensors of a file with their places in it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(max(_LENGTH_BYTES, len(_GIT_LFS_POINTER)))
            if start == _GIT_LFS_POINTER:
                raise ModelError(f"{path} is a Git LFS pointer; fetch the file it stands for")
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            data_start = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES or data_start > size:
                raise ModelError(f"{path} is cut short or no safetensors file: it has {size} bytes")
            file.seek(_LENGTH_BYTES)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = data_start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: its header cannot be read") from error
    if size != end:
        what = "cut short" if size < end else "damaged"
        raise ModelError(f"{path} is {what}: it has {size} bytes, its header tells of {end}")
    return dict(header)
