"""`cbatch doctor`: facts of the machine and of a model, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cbatch_kernels.cpu_library
import pytest
import torch
import transformers
from cbatch_kernels.cpu_library import KernelsUnavailable, load_kernels

from cbatch_cli import cpu_defaults
from cbatch_cli import doctor as doctor_module
from cbatch_cli.assembly import load_for_engines
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import BUILT_IN, CPUDefaults, key_for, store_defaults
from cbatch_cli.engine.kv_cache import KVCache, kv_cost
from cbatch_cli.engine.kv_groups import one_group
from cbatch_cli.engine.memory import available_memory
from tests.tiny_models import save_tiny_model, tiny_model
from tests.tiny_tokenizers import save_byte_tokenizer

ON_CPU = ["--device", "cpu"]


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["doctor", *arguments]) == status
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(doctor(capsys, *arguments, "--json", status=status))
    return report


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    def unavailable() -> tuple[str, ...]:
        raise KernelsUnavailable("a compiler is missing")

    monkeypatch.setattr(cbatch_kernels.cpu_library, "supported_variants", unavailable)
    return "a compiler is missing"


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = facts(capsys)
    assert set(report) == {"environment"}
    environment = report["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["packages"]["transformers"] == transformers.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment["cpu_kernels"] == load_kernels().variant
    assert environment["cpu_kernels_missing"] is None
    assert environment["available_memory"] == pytest.approx(available_memory(), rel=0.2)


def test_the_machine_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    lines = doctor(capsys).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "python",
        "packages",
        "device",
        *(["gpus"] if torch.cuda.is_available() else []),
        "threads",
        "CPU kernels",
        "defaults",
        "free memory",
    ]
    assert f"torch {torch.__version__}" in lines[1]


def test_why_there_are_no_kernels(capsys: pytest.CaptureFixture[str], no_kernels: str) -> None:
    environment = facts(capsys)["environment"]
    assert environment["cpu_kernels"] is None
    assert environment["cpu_kernels_missing"] == no_kernels
    assert f"CPU kernels  none: {no_kernels}" in doctor(capsys)


def test_layers_that_are_alike_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path)
    model = facts(capsys, "-m", str(tmp_path), *ON_CPU)["model"]
    assert model["attention_layers"] == [
        {
            "first": 0,
            "last": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "value_head_dim": 8,
            "window": None,
            "softcap": None,
            "sinks": False,
        }
    ]
    assert (model["type"], model["max_model_len"], model["dtype"]) == ("llama", 512, "float32")
    assert model["attention_backend"] == "cpu"
    assert model["fusion"]["num_fused"] == 3 and model["fusion"]["linear_kinds"] == {
        "packed": 12,
        "two_stage": 1,
    }
    assert "operations" not in model


def test_weights_that_stay_in_bfloat16_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    text = doctor(capsys, "-m", str(tmp_path), *ON_CPU, "--dtype", "float32")
    assert "12 packed_bfloat16, 1 two_stage\n" in text


def test_windows_softcaps_and_sinks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_tiny_model("gemma2_softcap", tmp_path / "gemma")
    text = doctor(capsys, "-m", str(tmp_path / "gemma"), *ON_CPU)
    assert "4 heads, 2 of keys and values, 8 wide, window 7, softcap 2\n" in text
    assert "\nlayer 1 " in text
    save_tiny_model("gpt_oss_sinks", tmp_path / "gpt")
    text = doctor(capsys, "-m", str(tmp_path / "gpt"), *ON_CPU)
    assert "8 wide, window 8, sinks\n" in text
    assert "0 of 3 layers; 3 not, since its mlp has no activation beside a gate" in text
    save_tiny_model("deepseek_v3_unequal_dims", tmp_path / "deepseek")
    assert "12/6 wide, sees all\n" in doctor(capsys, "-m", str(tmp_path / "deepseek"), *ON_CPU)


def test_bytes_of_a_token_are_those_of_the_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_tiny_model("deepseek_v3_unequal_dims", tmp_path)
    model = facts(capsys, "-m", str(tmp_path), *ON_CPU)["model"]
    (group,) = model["attention_layers"]
    shape = {name: group[name] for name in ("num_heads", "num_kv_heads")}
    widths = {name: group[name] for name in ("head_dim", "value_head_dim")}
    cache = KVCache(
        one_group(
            [LayerSpec(index=index, **shape, **widths) for index in range(group["last"] + 1)]
        ),
        num_blocks=1,
        block_size=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    sizes = [tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in layer]
    assert model["kv_cache"]["uniform_bytes_per_token"] == sum(sizes)
    assert model["kv_cache"]["bytes_per_token"] == sum(sizes), "no layer has a window"


def test_a_token_takes_what_it_takes_in_the_blocks_of_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: tmp_path / "none")
    save_tiny_model("gemma3", tmp_path / "model")
    options = ["-m", str(tmp_path / "model"), *ON_CPU]

    def bytes_per_token(block_size: int) -> int:
        cache = facts(capsys, *options)["model"]["kv_cache"]
        assert cache["block_size"] == block_size
        model = load_for_engines(str(tmp_path / "model"), EngineConfig(device="cpu")).model
        cost = kv_cost(
            model.layer_specs,
            context_len=cache["context_len"],
            block_size=block_size,
            dtype=torch.float32,
        )
        assert cache["bytes_per_token"] == round(cost.bytes_per_token)
        assert f"float32 in blocks of {block_size}, " in doctor(capsys, *options)
        return round(cost.bytes_per_token)

    default = bytes_per_token(BUILT_IN.block_size)
    monkeypatch.setenv("CBATCH_BLOCK_SIZE", "16")
    assert bytes_per_token(16) < default
    monkeypatch.delenv("CBATCH_BLOCK_SIZE")
    key = key_for(quantization="none", dtype="float32", kv_dtype="float32")
    store_defaults(key, CPUDefaults(block_size=16), speedup=2.0)
    assert bytes_per_token(16) < default


def test_windows_make_a_token_of_a_long_sequence_cheaper(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_tiny_model("gemma3", tmp_path)
    cache = facts(capsys, "-m", str(tmp_path), *ON_CPU)["model"]["kv_cache"]
    assert cache["bytes_per_token"] < 0.6 * cache["uniform_bytes_per_token"]
    assert "without windows" in doctor(capsys, "-m", str(tmp_path), *ON_CPU)


@pytest.mark.parametrize(("name", "most"), [("llama", 12), ("qwen3", 14), ("gemma3", 16)])
def test_operations_per_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, most: int
) -> None:
    save_tiny_model(name, tmp_path)
    operations = facts(capsys, "-m", str(tmp_path), *ON_CPU, "--ops")["model"]["operations"]
    after, before = operations["after_fusion"], operations["before_fusion"]
    assert max(after["per_layer"]) <= most < 2 * most < min(before["per_layer"])
    assert set(after["of_attention"]) == {1}
    assert after["of_the_longest_layer"]["cbatch::attention"] == 1
    assert "ops after fusion" in doctor(capsys, "-m", str(tmp_path), *ON_CPU, "--ops")


def test_what_became_of_parts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_tiny_model("gpt2", tmp_path / "gpt2")
    text = doctor(capsys, "-m", str(tmp_path / "gpt2"), *ON_CPU)
    assert "fused norms  0 of 5 norms; 2 not, since ln_1 is no RMSNorm; 2 not" in text
    save_tiny_model("deepseek_v3_unequal_dims", tmp_path / "deepseek")
    parts = facts(capsys, "-m", str(tmp_path / "deepseek"), *ON_CPU)["model"]["fusion"]["parts"]
    assert {kind: (part["num_fused"], part["num_found"]) for kind, part in parts.items()} == {
        "norms": (13, 13),
        "mlps": (3, 3),
        "projections": (3, 3),
    }


def test_a_model_without_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_kernels: str
) -> None:
    save_tiny_model("llama", tmp_path)
    model = facts(capsys, "-m", str(tmp_path), *ON_CPU, "--ops")["model"]
    assert model["attention_backend"] == "torch"
    assert model["fusion"]["operations"] == "torch" and model["fusion"]["num_fused"] == 3
    before, after = (model["operations"][when] for when in ("before_fusion", "after_fusion"))
    assert max(after["per_layer"]) < min(before["per_layer"])
    assert before["of_attention"] == after["of_attention"] and min(after["of_attention"]) > 1
    assert "3 of 3 layers; by torch operations" in doctor(capsys, "-m", str(tmp_path), *ON_CPU)


def test_a_refused_model_tells_of_the_machine_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    report = facts(capsys, "-m", missing, status=2)
    assert report["model"] == {"name": missing, "error": f"there is no model folder {missing}"}
    assert report["environment"]["packages"]["torch"] == torch.__version__
    assert main(["doctor", "-m", missing]) == 2
    output = capsys.readouterr()
    assert output.out.startswith("python") and "model" not in output.out
    assert output.err == f"cbatch: error: there is no model folder {missing}\n"


def test_operations_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ops"]) == 2
    assert "--ops needs --model" in capsys.readouterr().err


def test_what_runs_on_kernels_with_fixed_tiles() -> None:
    lines = doctor_module._fusion_lines(None, {"num_linears": 15, "num_norms": 9})
    assert lines["fused"] == "nothing: --deterministic"
    assert lines["fixed tiles"] == "15 linear layers, 9 norms"
