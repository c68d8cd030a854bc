"""GGUF files, converted once into folders that load in a second.

Dequantising and rebuilding the tokenizer take up to a minute, so the result is kept in a cache
under the SHA-256 of the GGUF file: safetensors, tokenizer.json, config, generation config.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from cbatch_cli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOGGER = logging.getLogger(__name__)

# Part of the key: raise it when a conversion gives other files than before.
_LAYOUT_VERSION = 3


def cache_root() -> Path:
    """Where converted models and measured defaults are kept: `CBATCH_CACHE`, else `cbatch` in the
    XDG cache folder.
    """
    if chosen := os.environ.get("CBATCH_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cbatch"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_folder(sha256: str, provide_gguf: Callable[[Path], Path]) -> Path:
    """The folder of the converted model whose GGUF file has this hash, made if it is missing.

    `provide_gguf(scratch)` returns the path of the GGUF file and may create it in the folder
    `scratch`; it is called only if the conversion has to be done. Two processes that ask at once
    convert once: the second waits. A conversion that is cut short leaves nothing that would be
    taken for a model. Raises `ModelError` if the file cannot be converted or the cache written.
    """
    folder = cache_root() / "gguf" / f"{sha256}-v{_LAYOUT_VERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert_into(folder, provide_gguf)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {folder.parent}: {error}; "
            "CBATCH_CACHE names another place"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, provide_gguf: Callable[[Path], Path]) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.", suffix=".tmp"))
    try:
        source = scratch / "source"
        source.mkdir()
        gguf_file = provide_gguf(source)
        LOGGER.warning("converting %s once into %s", gguf_file.name, folder)
        if gguf_file.parent != source:
            # Beside other files of a model folder transformers might read those as well.
            link = source / "model.gguf"
            link.symlink_to(gguf_file.resolve())
            gguf_file = link
        result = scratch / "result"
        _dequantize(gguf_file, result)
        _sync(result)
        result.rename(folder)
        _fsync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _dequantize(gguf_file: Path, result: Path) -> None:
    """Write the model of a GGUF file as plain float32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    from cbatch_cli.models.quiet import quiet_transformers

    # The absolute path: a bare name would be looked up in the current folder first.
    source = {
        "pretrained_model_name_or_path": str(gguf_file.parent),
        "gguf_file": str(gguf_file.absolute()),
    }
    try:
        with quiet_transformers(), _bar_on_terminals_only(), _file_parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
    except ImportError as error:
        raise ModelError(
            f"reading a GGUF file needs a package that is missing: {error}; "
            "`pip install cbatch[demo]` installs it"
        ) from error
    except Exception as error:  # every kind comes out of a damaged or unknown file
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"cannot convert the GGUF file: {reason}") from error
    with quiet_transformers():
        model.save_pretrained(result)
        _save_tokenizer(tokenizer, result)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, result: Path) -> None:
    """Save a tokenizer as one that is all in `tokenizer.json`, which loads in a third of the time.

    What was made from a GGUF file is: a class of its own would only build the same again.
    """
    tokenizer.save_pretrained(result)
    path = result / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    path = result / "tokenizer.json"
    path.write_bytes(_with_joined_merges(path.read_bytes()))


def _with_joined_merges(tokenizer_json: bytes) -> bytes:
    """The same tokenizer with each merge as one string, which is parsed in two thirds of the time.

    Unchanged where a token holds a space, at which such a string could not be split again.
    """
    content = orjson.loads(tokenizer_json)
    merges = content["model"].get("merges") or []
    if not all(isinstance(pair, list) and not any(" " in part for part in pair) for pair in merges):
        return tokenizer_json
    if merges:
        content["model"]["merges"] = [" ".join(pair) for pair in merges]
    return orjson.dumps(content)


@contextmanager
def _file_parsed_once() -> Iterator[None]:
    """Share one parsed header: transformers has the file parsed three times, 15 s each."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _bar_on_terminals_only() -> Iterator[None]:
    """transformers draws a bar of tensors that its own switch for bars does not turn off."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    draw = getattr(gguf_utils, "tqdm", None)
    if draw is None:
        yield
        return
    gguf_utils.tqdm = functools.partial(draw, disable=None)  # None: where there is no terminal
    try:
        yield
    finally:
        gguf_utils.tqdm = draw


def _sync(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_whole_gguf(path: Path) -> None:
    """Raise `ModelError` if `path` is no GGUF file or only one part of a split one."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file")
    if match := re.search(r"-\d{5}-of-(\d{5})\.gguf$", path.name):
        count = int(match.group(1))
        if count > 1:
            raise ModelError(
                f"{path} is one of {count} parts; join them with llama-gguf-split --merge first"
            )
