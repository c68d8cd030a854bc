"""The model's tokenizer, as transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cbatch_cli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, the fast one where there is one.

    It may be used by several threads at once. Raises `ModelError` if it cannot be loaded.
    """
    # transformers takes seconds to import and brings torch with it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # every kind comes out of a damaged or unknown tokenizer
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
    # A file may say how to truncate and pad. The first call would undo that, which fails while
    # another thread holds the tokenizer, so it is done now.
    tokenizer("", verbose=False)
    return tokenizer
