"""Whether a prompt fits: by its tokens, or by its characters before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cbatch_cli.errors import RowError
from cbatch_cli.request import check_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_COMPOSED = 4
"""Code points that NFC can join into one: no canonical decomposition is longer."""
_LENGTH_KEEPING_SPLITS = {"ByteLevel", "Digits", "Metaspace", "Split"}


def check_characters(
    num_characters: int, max_per_token: int, max_model_len: int, kv_capacity_tokens: int
) -> RowError | None:
    """`check_length` for the fewest tokens that so many characters can have.

    Spares the tokenizer a text of many megabytes, which costs it seventy times as much memory.
    """
    fewest = -(-num_characters // max_per_token)
    return check_length(fewest, max_model_len, kv_capacity_tokens, is_lower_bound=True)


def max_characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most characters of a text that one token can stand for; None where that has no bound.

    It has one for a BPE model that spells unknown characters in bytes, if nothing before it drops
    characters: then every token stands for a piece of text no longer than its own name.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    splits = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    if any(not _keeps_length(split) for split in splits):
        return None
    composed = 1
    for step in _parts(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            composed = _MAX_COMPOSED
        elif not _never_shortens(step):
            return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # swallows any run of spaces
        return None
    vocabulary = tokenizer.get_vocab()
    if any(split["type"] == "ByteLevel" for split in splits):
        from tokenizers.pre_tokenizers import ByteLevel

        spelling = ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        spelling = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(name in vocabulary for name in spelling):
        return None
    return composed * max(map(len, vocabulary))


def _parts(component: Any, plural: str) -> Iterator[Mapping[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, sequences laid flat."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending += part[plural]
        else:
            yield part


def _keeps_length(split: Mapping[str, Any]) -> bool:
    return split["type"] in _LENGTH_KEEPING_SPLITS and split.get("behavior") != "Removed"


def _never_shortens(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return bool(step["type"] == "Prepend")
