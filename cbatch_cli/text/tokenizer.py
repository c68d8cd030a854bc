"""The model's tokenizer, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch_cli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN_CLASS = "PreTrainedTokenizerFast"
_PLAIN_FILES = ("tokenizer.json", "tokenizer_config.json")
# What a tokenizer's settings may say for it to be built from `tokenizer.json` alone.
_PLAIN_SETTINGS = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
) | {"model_max_length", "chat_template"}
_SETTINGS_WITHOUT_EFFECT = frozenset({"tokenizer_class", "backend", "is_local", "local_files_only"})


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, the fast one where there is one.

    It may be used by several threads at once. Raises `ModelError` if it cannot be loaded.
    """
    # transformers takes seconds to import and brings torch with it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        settings = _plain_settings(folder)
        if settings is not None:
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), name_or_path=str(folder), **settings
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # every kind comes out of a damaged or unknown tokenizer
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
    # A file may say how to truncate and pad. The first call would undo that, which fails while
    # another thread holds the tokenizer, so it is done now.
    tokenizer("", verbose=False)
    return tokenizer


def _plain_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of a tokenizer that is all in `tokenizer.json`; None for any other.

    `AutoTokenizer` parses that file several times over, which takes seconds for a vocabulary of
    hundreds of thousands of words.
    """
    if not all((folder / name).is_file() for name in _PLAIN_FILES):
        return None
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    known = _PLAIN_SETTINGS | _SETTINGS_WITHOUT_EFFECT
    if settings.get("tokenizer_class") != _PLAIN_CLASS or not settings.keys() <= known:
        return None
    chat_template = folder / "chat_template.jinja"
    if chat_template.is_file():
        settings["chat_template"] = chat_template.read_text(encoding="utf-8")
    plain = {name: settings[name] for name in settings.keys() & _PLAIN_SETTINGS}
    return plain if all(isinstance(value, str | int) for value in plain.values()) else None
