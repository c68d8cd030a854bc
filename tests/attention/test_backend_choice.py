"""Which backend runs where."""

from __future__ import annotations

import sys

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
    assert choose_attention_backend("auto", CUDA) == "triton"
    assert choose_attention_backend("torch", CUDA) == "torch"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_attention_backend("auto", CUDA) == "torch"
    with pytest.raises(UsageError, match="triton is not installed"):
        choose_attention_backend("triton", CUDA)


def test_torch_on_cpu() -> None:
    assert choose_attention_backend("auto", CPU) == "torch"
    with pytest.raises(UsageError, match="does not run on cpu"):
        choose_attention_backend("triton", CPU)


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
