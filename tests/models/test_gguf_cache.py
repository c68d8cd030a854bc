"""GGUF conversion: right, once, and never seen half done."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2Config

from cbatch_cli.errors import ModelError
from cbatch_cli.models import gguf_cache
from cbatch_cli.models.loading import load_model, resolve_model
from tests.tiny_models import model_of
from tests.tiny_tokenizers import byte_level_tokenizer

SHA256 = "0" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


class FakeConversion:
    """Stands in for the conversion: writes two files, or fails between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fails = False
        self.started = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        monkeypatch.setattr(gguf_cache, "_dequantize", self)

    def __call__(self, gguf_file: Path, result: Path) -> None:
        self.count += 1
        self.source = gguf_file.read_bytes()
        result.mkdir()
        (result / "config.json").write_text("{}")
        self.started.set()
        self.may_finish.wait(30)
        if self.fails:
            raise ModelError("cannot convert the GGUF file")
        (result / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    return FakeConversion(monkeypatch)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    return path


def test_converted_once(conversion: FakeConversion, gguf_file: Path) -> None:
    folder = gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert conversion.source == b"GGUF and more"
    again = gguf_cache.converted_folder(SHA256, lambda scratch: pytest.fail("not needed"))
    assert again == folder and conversion.count == 1


def test_a_file_made_in_the_scratch_folder_is_not_kept(
    conversion: FakeConversion, cache: Path
) -> None:
    def provide(scratch: Path) -> Path:
        path = scratch / "assembled.gguf"
        path.write_bytes(b"GGUF, assembled")
        return path

    folder = gguf_cache.converted_folder(SHA256, provide)
    assert conversion.source == b"GGUF, assembled"
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_a_failed_conversion_leaves_nothing(
    conversion: FakeConversion, gguf_file: Path, cache: Path
) -> None:
    conversion.fails = True
    with pytest.raises(ModelError, match="cannot convert"):
        gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    conversion.fails = False
    assert gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file).is_dir()


def test_what_a_killed_process_left_is_cleared_and_not_taken_for_a_model(
    conversion: FakeConversion, gguf_file: Path, cache: Path
) -> None:
    program = """
import os, sys
from pathlib import Path
from cbatch_cli.models import gguf_cache

def convert(gguf_file, result):
    result.mkdir()
    (result / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), 9)

gguf_cache._dequantize = convert
gguf_cache.converted_folder(sys.argv[1], lambda scratch: Path(sys.argv[2]))
"""
    arguments = [sys.executable, "-c", program, SHA256, str(gguf_file)]
    assert subprocess.run(arguments, capture_output=True, check=False).returncode == -9
    assert [path for path in cache.iterdir() if path.suffix == ".tmp"]
    folder = gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


def test_the_second_of_two_waits_for_the_first(conversion: FakeConversion, gguf_file: Path) -> None:
    conversion.may_finish.clear()
    folders: list[Path] = []

    def convert() -> None:
        folders.append(gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file))

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert conversion.started.wait(30)
    conversion.may_finish.set()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 2 and folders[0] == folders[1]
    assert conversion.count == 1


def test_a_cache_that_cannot_be_written(
    conversion: FakeConversion, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBATCH_CACHE", str(gguf_file))
    with pytest.raises(ModelError, match="CBATCH_CACHE names another place"):
        gguf_cache.converted_folder(SHA256, lambda scratch: gguf_file)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gguf_cache.cache_root() == Path(os.environ["CBATCH_CACHE"])
    monkeypatch.delenv("CBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert gguf_cache.cache_root() == Path("/xdg/cbatch")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert gguf_cache.cache_root() == Path.home() / ".cache" / "cbatch"


def tiny_gguf(path: Path) -> tuple[Any, Any]:
    """Write a random Qwen2 with a byte-level tokenizer; returns both as transformers has them."""
    tokenizer = byte_level_tokenizer(chat_template=None)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    model = model_of(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.25,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_ids)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        values = weight.numpy().astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quantize(values, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values, raw_dtype=kind)
        if kind is gguf.GGMLQuantizationType.Q8_0:
            weight.copy_(torch.from_numpy(gguf.dequantize(values, kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current folder with a decoy of the name that the conversion uses for its source."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF, but another one")
    monkeypatch.chdir(folder)
    yield


@pytest.mark.usefixtures("elsewhere")
def test_a_real_conversion(tmp_path: Path) -> None:
    path = tmp_path / "tiny-q8.gguf"
    model, tokenizer = tiny_gguf(path)
    files = resolve_model(str(path))
    assert files.commit == f"sha256:{gguf_cache.file_sha256(path)}"
    converted = load_model(files, device="cpu")
    assert converted.dtype == torch.float32
    assert converted.eos_token_ids == {tokenizer.eos_token_id}
    token_ids = torch.arange(20)
    with torch.inference_mode():
        expected = model(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(converted.eager_logits(token_ids, token_ids), expected)
    text = "The quick brown fox, naïve café"
    loaded = AutoTokenizer.from_pretrained(files.folder)
    plain = {"add_special_tokens": False}
    assert loaded(text, **plain).input_ids == tokenizer(text, **plain).input_ids


class Stream(io.StringIO):
    """What is written, on a terminal or elsewhere."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_drawn_on_terminals_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    resolve_model(str(tmp_path / "tiny.gguf"))
    assert ("de-quantizing" in stream.getvalue()) is is_terminal
    assert ("\r" in stream.getvalue()) is is_terminal


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot convert the GGUF file"):
        resolve_model(str(path))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="cannot convert the GGUF file"):
        resolve_model(str(path))


def test_joined_merges_are_the_same_tokenizer() -> None:
    backend = byte_level_tokenizer(chat_template=None).backend_tokenizer
    pairs = json.loads(backend.to_str())
    assert isinstance(pairs["model"]["merges"][0], list)
    joined = gguf_cache._with_joined_merges(json.dumps(pairs).encode())
    assert isinstance(json.loads(joined)["model"]["merges"][0], str)
    assert Tokenizer.from_buffer(joined).to_str() == backend.to_str()


def test_merges_of_tokens_with_spaces_stay_pairs() -> None:
    merges = [["a", "b"], [" ", "a"]]
    text = json.dumps({"model": {"type": "BPE", "merges": merges}}).encode()
    assert gguf_cache._with_joined_merges(text) == text
