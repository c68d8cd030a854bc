"""Small tokenizers of the kinds that models have, built in milliseconds."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ("<|start|>", "<|end|>")
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
_SPECIAL = (BOS, EOS, PAD, *CHAT_TOKENS)
_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
_SAMPLE = [
    "The quick brown fox jumps over the lazy dog, and the dog stops there.",
    "Stop words: the end, the END, of a line.\n\n  Two spaces, a tab\tand a new line.",
    "日本の首都は東京です。naïve café über Ærøskøbing, 12345 and 67890!",
]


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Id 0 to 255 is the byte of that value; then bos 256, eos 257, pad 258 and two more."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_characters())}
    return _finish(_byte_level(vocabulary, []), chat_template)


def save_byte_tokenizer(folder: Path) -> Path:
    """A folder from which transformers loads `byte_tokenizer`."""
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_level_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges, as GPT-2, Llama 3 and Qwen have it."""
    vocabulary, merges = _trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), sorted(_byte_characters()), ()
    )
    return _finish(_byte_level(vocabulary, merges), chat_template)


def llama_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """BPE over SentencePiece text with byte fallback, which writes a space before a text."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _finish(_sentencepiece(normalizer, [decoders.Strip(" ", 1, 0)]), chat_template)


def gemma_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """BPE over SentencePiece text with byte fallback, no space added before a text."""
    return _finish(_sentencepiece(normalizers.Replace(" ", "▁"), []), chat_template)


def all_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """One of each kind, by name."""
    return {
        "byte": byte_tokenizer(),
        "byte_level": byte_level_tokenizer(),
        "llama": llama_tokenizer(),
        "gemma": gemma_tokenizer(),
    }


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(normalizer: object, last_decoders: list[object]) -> Tokenizer:
    vocabulary, merges = _trained(None, [], ("<unk>", *_BYTE_NAMES))
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last_decoders]
    )
    return tokenizer


def _trained(
    split: object | None, alphabet: list[str], first: tuple[str, ...]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and merges from a little text; `first` are the ids from 0 on."""
    import json

    trained = Tokenizer(models.BPE())
    if split is None:
        trained.normalizer = normalizers.Replace(" ", "▁")
        # Only letters are learnt, so that other scripts are spelt in bytes.
        texts = [text for text in _SAMPLE if text.isascii()]
    else:
        trained.pre_tokenizer = split
        texts = _SAMPLE
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=list(first), show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _finish(tokenizer: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _byte_characters() -> list[str]:
    """The character that stands for each byte, as GPT-2 chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
