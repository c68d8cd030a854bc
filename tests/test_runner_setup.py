"""What an engine does on its device follows from the device, and is refused where it cannot be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.client import OneByOne
from cbatch_cli.errors import UsageError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.runner_setup import resolve_features
from tests.tiny_models import tiny_model


def features(
    device: str, backend: str, **settings: Any
) -> tuple[tuple[bool, bool, bool], list[str]]:
    model: Any = SimpleNamespace(device=torch.device(device), attention_backend=backend)
    lines: list[str] = []
    found = resolve_features(EngineConfig(**settings), model, lines.append)
    return (found.is_device_runner, found.overlap, found.cuda_graphs), lines


def test_a_gpu_does_what_it_can() -> None:
    pytest.importorskip("triton")
    assert features("cuda", "triton") == ((True, True, True), [])
    assert features("cuda", "triton", overlap=True, cuda_graphs=True) == ((True, True, True), [])
    assert features("cuda", "triton", overlap=False) == ((True, False, True), [])
    assert features("cuda", "triton", cuda_graphs=False) == ((True, True, False), [])
    assert features("cuda", "torch", cuda_graphs=False) == ((True, True, False), [])
    found, lines = features("cuda", "torch")
    assert found == (True, True, False)
    assert lines == ["CUDA graphs are not in use: attention runs on torch, not on triton"]


def test_without_triton_a_gpu_waits_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, lines = features("cuda", "torch")
    assert found == (False, False, False)
    assert len(lines) == 1 and "triton is not installed" in lines[0]
    with pytest.raises(UsageError, match="--overlap is not possible: .*triton is not installed"):
        features("cuda", "torch", overlap=True)


@pytest.mark.parametrize(
    ("settings", "option"), [({"overlap": True}, "--overlap"), ({"cuda_graphs": True}, "--cuda-")]
)
def test_a_cpu_refuses_what_only_a_gpu_does(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"{option}.*the model runs on cpu, not on a GPU"):
        features("cpu", "cpu", **settings)


def test_on_a_cpu_steps_run_one_by_one() -> None:
    assert features("cpu", "cpu") == ((False, False, False), [])
    assert features("cpu", "cpu", overlap=False, cuda_graphs=False)[0] == (False, False, False)
    model = HFModel(
        tiny_model("llama"), max_model_len=64, eos_token_ids=frozenset(), generation_defaults={}
    )
    core, limits = build_core(model, EngineConfig(num_kv_blocks=8))
    assert isinstance(core._runner, OneByOne) and core._runner.lag == 0
    assert not limits.overlap and not limits.cuda_graphs
