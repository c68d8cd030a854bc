"""Scales of keys and values as published checkpoints name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch_cli.assembly import load_for_engines
from cbatch_cli.attention.metadata import KVScales
from cbatch_cli.config import EngineConfig
from cbatch_cli.errors import ModelError
from cbatch_cli.models.kv_scales import read_kv_scales
from tests.tiny_models import save_tiny_model

LAYERS = {0: "model.layers.0.self_attn", 1: "model.layers.1.self_attn"}


def save(folder: Path, **tensors: object) -> Path:
    save_file(
        {name: torch.as_tensor(value) for name, value in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_names(tmp_path: Path, prefix: str, k_name: str, v_name: str) -> None:
    layer = f"{prefix}layers.1.self_attn"
    names = {f"{layer}.{k_name}": 0.5, f"{layer}.{v_name}": [0.25]}
    names[f"{prefix}layers.0.mlp.down_proj.weight_scale"] = 7.0
    assert read_kv_scales(save(tmp_path, **names), LAYERS) == {1: KVScales(k=0.5, v=0.25)}


def test_one_scale_for_both(tmp_path: Path) -> None:
    folder = save(tmp_path, **{"model.layers.0.self_attn.kv_scale": 2.0})
    assert read_kv_scales(folder, LAYERS) == {0: KVScales(k=2.0, v=2.0)}


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.0, "is 0.0, which is no scale"), (float("nan"), "is nan"), ([1.0, 2.0], "for each head")],
)
def test_what_is_no_scale(tmp_path: Path, value: object, message: str) -> None:
    folder = save(tmp_path, **{"model.layers.0.self_attn.k_scale": value})
    with pytest.raises(ModelError, match=message):
        read_kv_scales(folder, LAYERS)


def test_a_loaded_model_keeps_keys_and_values_by_its_scales(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{index}.self_attn.{name}_scale": torch.tensor(0.5 + index)
        for index in range(2)
        for name in ("k", "v")
    }
    save_file({**load_file(path), **scales}, path, metadata={"format": "pt"})
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        kv_cache_dtype="fp8_e4m3",
        num_kv_blocks=8,
    )
    loaded = load_for_engines(str(tmp_path), config)
    lines: list[str] = []
    loaded.build_engine(config, lines.append)
    assert [loaded.model.kv_scales[index].k for index in range(2)] == [0.5, 1.5]
    assert lines[0].startswith("1 of 3 layers keep keys and values of eight bits with a scale of 1")
