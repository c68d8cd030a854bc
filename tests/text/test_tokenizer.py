"""Loading a tokenizer, and sharing it between threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cbatch_cli.errors import ModelError
from cbatch_cli.text.detokenizer import Detokenizer
from cbatch_cli.text.tokenizer import load_tokenizer
from tests.tiny_tokenizers import byte_tokenizer, save_byte_tokenizer


def test_a_saved_tokenizer_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path), trust_remote_code=False)
    assert tokenizer.is_fast
    assert tokenizer("hi")["input_ids"] == [256, 104, 105]
    assert tokenizer.chat_template == byte_tokenizer().chat_template


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path, trust_remote_code=False)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tokenizer(tmp_path, trust_remote_code=False)


def test_truncation_in_the_file_is_ignored_from_the_start(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, trust_remote_code=False)
    assert loaded.backend_tokenizer.truncation is None
    assert loaded.backend_tokenizer.padding is None
    assert len(loaded("a" * 100)["input_ids"]) == 101


def test_threads_encode_and_decode_at_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path), trust_remote_code=False)
    detokenizer = Detokenizer(tokenizer)
    texts = ["a longer text " * 200] * 20

    def encode(_: int) -> int:
        return len(tokenizer(texts, add_special_tokens=True)["input_ids"])

    def decode(_: int) -> str:
        return detokenizer.decode([256, 97], list(b"bc" * 2000))

    with ThreadPoolExecutor(4) as pool:
        encoded = pool.map(encode, range(20))
        decoded = pool.map(decode, range(200))
        assert set(encoded) == {20}
        assert set(decoded) == {"bc" * 2000}


def test_importing_the_room_loads_nothing_heavy() -> None:
    modules = "detokenizer, length, messages, prompts, render_worker, stop_strings, tokenizer"
    code = f"""
import sys
from cbatch_cli.text import {modules}, row_prompt, rendering, templates
heavy = {{"torch", "transformers", "tokenizers", "jinja2", "pyarrow"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
