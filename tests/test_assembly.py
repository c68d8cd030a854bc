"""What is put together for which settings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cbatch_kernels import cpu_library, cpu_linear

from cbatch_cli.assembly import LoadedModel, load_for_engines
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine_checks import check_without_model
from cbatch_cli.errors import UsageError
from tests.tiny_models import save_tiny_model, tiny_llama


def load(folder: Path, **settings: object) -> LoadedModel:
    return load_for_engines(str(folder), EngineConfig(dtype="float32", **settings))  # type: ignore[arg-type]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "llama")


@pytest.mark.parametrize("deterministic", [None, True])
def test_products_on_a_cpu_do_not_hang_on_a_measurement(
    llama: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool | None
) -> None:
    """Two runs on one machine must not differ because it was busy at the start of one."""
    monkeypatch.setattr(cpu_linear, "_fastest_kind", lambda *_: pytest.fail("measured"))
    report = load(llama, deterministic=deterministic).fusion
    assert report.operations == "compiled" and report.num_fused == report.num_layers
    assert set(report.linear_kinds) == {"packed", "two_stage"}


def test_a_measurement_chooses_where_that_is_allowed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_fastest_kind", lambda *_: "torch")
    report = load(llama, deterministic=False).fusion
    assert set(report.linear_kinds) == {"torch", "two_stage"}


def test_without_compiled_kernels_only_what_needs_them_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(variant: str | None = None) -> None:
        raise cpu_library.KernelsUnavailable("not built")

    monkeypatch.setattr("cbatch_kernels.cpu_library.load_kernels", unavailable)
    fusion = load(llama).fusion
    assert fusion.operations == "torch" and fusion.num_fused == fusion.num_layers
    with pytest.raises(UsageError, match="^--deterministic needs the compiled CPU kernels: not"):
        load(llama, deterministic=True)
    for quantization in ("w8a16", "w8a8"):
        message = f"^--quantization {quantization} needs the compiled CPU kernels"
        with pytest.raises(UsageError, match=message):
            load(llama, quantization=quantization)


@pytest.mark.parametrize(
    ("settings", "is_invariant"),
    [
        ({"deterministic": True}, True),
        ({}, True),
        ({"deterministic": False}, False),
        ({"deterministic": False, "quantization": "w8a16"}, True),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_an_engine_says_whether_rows_have_the_same_bits_in_any_company(
    llama: Path, settings: dict[str, Any], is_invariant: bool
) -> None:
    config = EngineConfig(**{"dtype": "float32", "device": "cpu", **settings}, num_kv_blocks=4)
    description = load_for_engines(str(llama), config).build_engine(config).description
    assert description["batch_invariant"] is is_invariant
    assert description["quantization"] == settings.get("quantization", "none")


def test_an_engine_of_layers_that_are_not_ours_promises_nothing(tmp_path: Path) -> None:
    config = EngineConfig(dtype="float32", device="cpu", num_kv_blocks=40)
    folder = save_tiny_model("mixtral", tmp_path / "mixtral")
    assert (
        load_for_engines(str(folder), config).build_engine(config).description["batch_invariant"]
        is False
    )


WITHOUT_A_MODEL = [
    (
        {"quantization": "w8a8", "device": "cuda"},
        "device cuda asked for, but this machine has no usable GPU",
    ),
    ({"attention_backend": "triton"}, "attention backend triton does not run on cpu"),
    (
        {"quantization": "w8a8", "dtype": "bfloat16"},
        "--quantization w8a8 needs a float32 model on a CPU$",
    ),
    (
        {"deterministic": True, "dtype": "bfloat16"},
        "--deterministic needs a float32 model on a CPU, or Triton's attention on a GPU$",
    ),
    ({"kv_cache_dtype": "fp8_e4m3"}, "--attention-backend torch has it$"),
    ({"kv_cache_dtype": "float16", "attention_backend": "cpu"}, "torch has it$"),
    ({"attention_backend": "cpu", "dtype": "float16"}, "attention backend cpu: it does not run"),
    ({"cuda_graphs": True}, "--cuda-graphs is not possible: the model runs on cpu, not on a GPU"),
    ({"overlap": True}, "--overlap is not possible: the model runs on cpu, not on a GPU"),
]


@pytest.mark.parametrize(("settings", "message"), WITHOUT_A_MODEL)
def test_what_the_machine_does_not_have_is_told_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=message):
        load_for_engines("/there/is/no/model", EngineConfig(**{"device": "cpu", **settings}))


def test_a_job_does_not_look_for_its_model_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have to be downloaded, or to be converted for a minute."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    options = ["-m", "/no/model", "-o", str(tmp_path / "out.parquet"), "--device", "cpu"]
    assert main(["run", str(prompts), *options, "--cuda-graphs"]) == 2
    assert "--cuda-graphs is not possible" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet.cbatch").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch"},
        {"kv_cache_dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "float16", "attention_backend": "torch"},
        {"overlap": False, "cuda_graphs": False},
        {"quantization": "w8a8"},
        {"deterministic": True, "dtype": "float32"},
    ],
)
def test_what_the_machine_has_is_left_to_the_model(settings: dict[str, Any]) -> None:
    check_without_model(EngineConfig(**{"device": "cpu", **settings}))


def test_what_hangs_on_the_dtype_of_the_model_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU nobody knows what a checkpoint is in before its config is read."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_without_model(EngineConfig(device="cuda", kv_cache_dtype="bfloat16"))
    check_without_model(EngineConfig(device="cuda", deterministic=True, cuda_graphs=True))
    refused = EngineConfig(device="cuda", kv_cache_dtype="bfloat16", dtype="float16")
    with pytest.raises(UsageError, match="does not go with a float16 model"):
        check_without_model(refused)


def test_it_is_said_that_memory_ends_answers_before_the_context_does(llama: Path) -> None:
    loaded = load(llama)
    lines: list[str] = []
    loaded.build_engine(EngineConfig(num_kv_blocks=4, block_size=16), lines.append)
    assert any("ends an answer at 64 tokens" in line for line in lines)
    lines.clear()
    loaded.release_engine()
    loaded.build_engine(EngineConfig(max_model_len=64), lines.append)
    assert not any("ends an answer" in line for line in lines)


def test_half_precision_is_fused_over_torch(llama: Path) -> None:
    loaded = load_for_engines(str(llama), EngineConfig(dtype="bfloat16", device="cpu"))
    assert loaded.fusion.operations == "torch"
    assert loaded.fusion.num_fused == loaded.fusion.num_layers
    description = loaded.build_engine(EngineConfig(num_kv_blocks=4)).description
    assert description["fusion"]["parts"]["norms"] == {
        "num_found": 1,
        "num_fused": 1,
        "reasons": {},
    }


def test_parts_do_not_make_a_model_deterministic(tmp_path: Path) -> None:
    folder = save_tiny_model("mixtral", tmp_path / "mixtral")
    assert load(folder).fusion.parts["projections"].num_fused == 3
    for settings in ({"deterministic": True}, {"quantization": "w8a16"}, {"quantization": "w8a8"}):
        with pytest.raises(UsageError, match="needs every layer to be fused, which failed"):
            load(folder, **settings)


def test_no_half_precision_is_rounded_to_8_bits(llama: Path) -> None:
    with pytest.raises(UsageError, match="^--quantization w8a16 needs a float32 model on a CPU$"):
        load_for_engines(str(llama), EngineConfig(dtype="bfloat16", quantization="w8a16"))
