"""Which backend runs where."""

from __future__ import annotations

import sys

import cbatch_kernels.cpu_library as cpu_library
import pytest
import torch

from cbatch_cli.attention.backend import build_attention_backend, choose_attention_backend
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.errors import UsageError
from tests.attention.paged_cases import make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_triton_on_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert choose_attention_backend("auto", CUDA, torch.bfloat16) == "triton"
    assert choose_attention_backend("torch", CUDA, torch.bfloat16) == "torch"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_attention_backend("auto", CUDA, torch.bfloat16) == "torch"
    with pytest.raises(UsageError, match="triton is not installed"):
        choose_attention_backend("triton", CUDA, torch.bfloat16)


def test_our_kernels_on_a_cpu_where_they_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise cpu_library.KernelsUnavailable("they were not built")

    with pytest.raises(UsageError, match="does not run on cpu; leave the option out"):
        choose_attention_backend("triton", CPU, torch.float32)
    monkeypatch.setattr(cpu_library, "load_kernels", lambda: None)
    assert choose_attention_backend("auto", CPU, torch.float32) == "cpu"
    assert choose_attention_backend("auto", CPU, torch.float16) == "torch"
    monkeypatch.setattr(cpu_library, "load_kernels", missing)
    assert choose_attention_backend("auto", CPU, torch.float32) == "torch"
    with pytest.raises(UsageError, match="they were not built"):
        choose_attention_backend("cpu", CPU, torch.float32)
    with pytest.raises(UsageError, match="does not run on cuda"):
        choose_attention_backend("cpu", CUDA, torch.float32)


def test_built_by_name() -> None:
    case = make_case([(3, 1)])
    backend = build_attention_backend(
        "torch",
        [case.layer],
        [(case.k_cache, case.v_cache)],
        case.block_size,
        max_num_seqs=1,
        max_model_len=16,
    )
    assert isinstance(backend, TorchAttentionBackend)
