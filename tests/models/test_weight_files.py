"""Weights that are missing, cut short or damaged are refused by the name of their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from cbatch_cli.errors import ModelError
from cbatch_cli.models import loading
from cbatch_cli.models.loading import ModelFiles, load_model
from cbatch_cli.models.weight_files import check_weight_files
from tests.tiny_models import tiny_llama, tiny_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model("llama").save_pretrained(folder, max_shard_size="30KB")
    return folder


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path)


def shard(folder: Path) -> Path:
    names = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    assert len(names) > 2
    return names[1]


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_weight_files(folder, "a model")
    return str(caught.value)


def test_whole_files_pass(single: Path, saved: Path) -> None:
    check_weight_files(single, "a model")
    check_weight_files(saved, "a model")


@pytest.mark.parametrize("cut", [1, 1000, 20_000])
def test_a_file_that_is_cut_short(single: Path, cut: int) -> None:
    path = single / SINGLE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    assert refused(single) == (
        f"{path} is cut short: it has {size - cut} bytes, its header tells of {size}"
    )


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_file_that_is_cut_short_in_its_header(single: Path, size: int) -> None:
    path = single / SINGLE
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path} is cut short or no safetensors file: it has {size} bytes" == refused(single)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x08\0\0\0\0\0\0\0not json", "is damaged: its header cannot be read"),
        (b"\x02\0\0\0\0\0\0\0[]", "is damaged: its header cannot be read"),
        (b'\x08\0\0\0\0\0\0\0{"a": 1}', "is damaged: its header cannot be read"),
        (b"\x02\0\0\0\0\0\0\0{}more", "is damaged: it has 14 bytes, its header tells of 10"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer; fetch the file"),
    ],
)
def test_a_file_that_is_no_safetensors(single: Path, content: bytes, message: str) -> None:
    (single / SINGLE).write_bytes(content)
    assert f"{single / SINGLE} {message}" in refused(single)


def test_a_link_whose_file_is_gone(single: Path) -> None:
    (single / SINGLE).unlink()
    (single / SINGLE).symlink_to(single / "gone")
    assert refused(single) == "a model has no safetensors weights" or "is missing" in refused(
        single
    )


def test_one_of_several_files_is_missing_or_cut_short(sharded: Path) -> None:
    path = shard(sharded)
    content = path.read_bytes()
    path.unlink()
    assert refused(sharded) == f"{path} is missing"
    path.write_bytes(content[:-1])
    assert f"{path} is cut short" in refused(sharded)


def test_a_tensor_that_the_index_names_is_not_in_its_file(sharded: Path) -> None:
    path = shard(sharded)
    weights = safetensors.torch.load_file(path)
    lost = sorted(weights)[0]
    del weights[lost]
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    assert refused(sharded) == f"{path} lacks the tensor {lost}, which the index says it holds"


@pytest.mark.parametrize("content", ["not json", "{}", "[]", '{"weight_map": 1}', "\xff"])
def test_an_index_that_cannot_be_read(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    assert f"{sharded / INDEX} is damaged" in refused(sharded)


def test_a_single_file_goes_before_an_index(sharded: Path) -> None:
    tiny_model("llama").save_pretrained(sharded, max_shard_size="1GB")
    assert (sharded / SINGLE).exists()
    (sharded / INDEX).write_text("left over")
    check_weight_files(sharded, "a model")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused(
    sharded: Path, value: float, dtype: torch.dtype
) -> None:
    path = shard(sharded)
    weights = safetensors.torch.load_file(path)
    name = sorted(weights)[0]
    weights[name] = weights[name].to(dtype)
    weights[name].view(-1)[3] = value
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    files = ModelFiles(name="a model", folder=sharded, commit=None)
    with pytest.raises(ModelError) as caught:
        load_model(files, device="cpu", dtype="auto")
    assert str(caught.value) == f"{path} is damaged: the weight {name} holds NaN or infinity"


def test_large_weights_are_numbers(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = single / SINGLE
    weights = safetensors.torch.load_file(path)
    weights["lm_head.weight"][5] = 1e30
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    assert not torch.linalg.vector_norm(weights["lm_head.weight"]).isfinite()
    monkeypatch.setattr(loading, "self_check", lambda *arguments: None)  # they swamp its arithmetic
    load_model(ModelFiles(name="a model", folder=single, commit=None), device="cpu")


def test_the_index_is_what_transformers_writes(saved: Path) -> None:
    weight_map = json.loads((saved / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
