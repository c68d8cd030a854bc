"""What is put together for which settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cbatch_kernels import cpu_library, cpu_linear

from cbatch_cli.assembly import LoadedModel, load_for_engines
from cbatch_cli.config import EngineConfig
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
