"""From a folder to a checked model: dtype, device, end tokens, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from cbatch_cli.errors import ModelError
from cbatch_cli.models import loading
from cbatch_cli.models.loading import ModelFiles, load_model
from tests.tiny_models import CONFIGS, EOS_TOKEN_ID, model_of, save_tiny_model, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path)


def files(folder: Path) -> ModelFiles:
    return ModelFiles(name="a model", folder=folder, commit=None)


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


def test_loads_quietly(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(files(folder), device="cpu")
    assert model.dtype == torch.float32 and model.device == torch.device("cpu")
    assert model.max_model_len == 512
    assert model.eos_token_ids == {EOS_TOKEN_ID}
    assert model.generation_defaults == {}
    assert capfd.readouterr() == ("", "")


def test_transformers_output_is_restored(folder: Path) -> None:
    transformers.logging.enable_progress_bar()
    verbosity = transformers.logging.get_verbosity()
    load_model(files(folder), device="cpu")
    assert transformers.logging.is_progress_bar_enabled()
    assert transformers.logging.get_verbosity() == verbosity


def test_a_multimodal_model_runs_as_text(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"](),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=280,
    )
    model_of(config).save_pretrained(tmp_path)
    model = load_model(files(tmp_path), device="cpu")
    assert [spec.sliding_window for spec in model.layer_specs] == [8, None, 8]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_asked_for(folder: Path, name: Any) -> None:
    assert load_model(files(folder), device="cpu", dtype=name).dtype == getattr(torch, name)


@pytest.mark.parametrize(
    ("stored", "has_amx", "expected"),
    [
        (torch.float32, True, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
    ],
)
def test_dtype_auto_on_a_cpu(
    stored: torch.dtype, has_amx: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    config = CONFIGS["llama"]()
    config.dtype = stored
    assert loading._resolve_dtype(config, "auto", torch.device("cpu")) == expected


def test_dtype_auto_on_a_gpu_is_the_checkpoints() -> None:
    assert loading._resolve_dtype(CONFIGS["llama"](), "auto", torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [([1, 2], 3, {1, 2}), (4, 3, {4}), (None, 3, {3}), (None, [3, 5], {3, 5})],
)
def test_end_tokens_come_from_the_generation_config_first(
    folder: Path, in_generation_config: Any, in_config: Any, expected: set[int]
) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=in_generation_config)
    edit_json(folder / "config.json", eos_token_id=in_config)
    assert load_model(files(folder), device="cpu").eos_token_ids == expected


def test_end_token_of_the_tokenizer_is_the_last_resort(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    # Llama's own default would step in for a key that is merely absent.
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"eos_token_id": null, ', 1))
    assert load_model(files(folder), device="cpu").eos_token_ids == {EOS_TOKEN_ID}


def test_generation_defaults_are_those_that_are_set(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.05,
        max_new_tokens=99,
    )
    model = load_model(files(folder), device="cpu")
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 99}
    assert model.generation_defaults == expected
    assert "repetition_penalty" in caplog.text


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack 1 of the weights .*layers.1.mlp.up_proj.weight"):
        load_model(files(folder), device="cpu")


def test_weights_of_other_shapes_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=50)
    with pytest.raises(ModelError, match="cannot load a model"):
        load_model(files(folder), device="cpu")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="type t5 cannot be run: they have an encoder"):
        load_model(files(tmp_path), device="cpu")


@pytest.mark.parametrize("config", ["{}", "not json", '{"model_type": "no-such-type"}'])
def test_a_config_that_cannot_be_read_is_refused(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match="cannot read the config of a model"):
        load_model(files(folder), device="cpu")


def test_a_model_that_generates_no_text_is_refused(folder: Path) -> None:
    transformers.ViTConfig().save_pretrained(folder)
    with pytest.raises(ModelError, match="type vit cannot be run: they do not generate text"):
        load_model(files(folder), device="cpu")


def test_modelling_code_that_fails_to_build_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="reformer", is_decoder=False)
    with pytest.raises(ModelError, match="cannot load a model: If you want to use `Reformer"):
        load_model(files(folder), device="cpu")


def test_a_model_that_fails_the_self_check_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("mistral_window", tmp_path)

    def broken(*args: Any) -> None:
        raise IndexError("index 7 is out of bounds\nand more")

    monkeypatch.setattr(loading, "self_check", broken)
    expected = (
        "type mistral cannot be run: packed tokens end in IndexError: index 7 is out of bounds$"
    )
    with pytest.raises(ModelError, match=expected):
        load_model(files(folder), device="cpu")


def test_remote_code_is_off_by_default(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="a model brings code of its own, which runs only with"):
        load_model(files(folder), device="cpu")
    assert not (folder / "ran").exists()
