"""A KV cache of a narrower type: smaller, and a row still does not depend on its neighbours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from cbatch_cli.api import run
from cbatch_cli.assembly import load_for_engines
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_cache import KVCache
from cbatch_cli.errors import UsageError
from tests.test_batch_invariance import answer, make_requests, start
from tests.tiny_models import save_tiny_model, tiny_llama

WAYS = [
    {"kv_cache_dtype": "bfloat16", "attention_backend": "cpu"},
    {"kv_cache_dtype": "bfloat16", "attention_backend": "torch"},
    {"kv_cache_dtype": "float16", "attention_backend": "torch"},
    {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch"},
    {"kv_cache_dtype": "fp8_e5m2", "attention_backend": "torch"},
]


def name_of(way: dict[str, Any]) -> str:
    return "-".join(map(str, way.values()))


@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_order_budget_and_neighbours_change_nothing(
    tmp_path: Path, model: str, way: dict[str, Any]
) -> None:
    folder = save_tiny_model(model, tmp_path)
    requests = make_requests(14)
    together = answer(start(folder, max_num_seqs=64, max_num_batched_tokens=2048, **way), requests)
    random.Random(3).shuffle(requests)
    alone = start(folder, max_num_seqs=1, max_num_batched_tokens=7, prefix_caching=False, **way)
    assert answer(alone, requests) == together
    preempted = start(
        folder,
        max_num_seqs=8,
        max_num_batched_tokens=33,
        block_size=4,
        num_kv_blocks=27,
        **way,
    )
    assert answer(preempted, requests) == together
    core = preempted._loaded.client
    assert isinstance(core, EngineCore) and core.stats.num_preemptions > 0
    # What is rounded is not the same: the dtype is in use.
    assert answer(start(folder, max_num_seqs=64), requests) != together


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_pool_is_of_that_dtype_and_holds_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    pools: list[KVCache] = []

    class Noted(KVCache):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            pools.append(self)

    monkeypatch.setattr("cbatch_cli.engine.kv_cache.KVCache", Noted)
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        kv_cache_dtype=name,  # type: ignore[arg-type]
        kv_cache_memory=3 * 2 * 2 * 8 * 4 * 64 * 10,
        block_size=64,
    )
    folder = tiny_llama(tmp_path)
    engine = load_for_engines(str(folder), config).build_engine(config)
    assert {tensor.dtype for pair in pools[0].layers for tensor in pair} == {dtype}
    assert engine.description["kv_cache_dtype"] == str(dtype).removeprefix("torch.")
    assert engine.description["num_blocks"] == 10 * 4 // dtype.itemsize


def test_a_dtype_that_cannot_be_kept_is_told_before_layers_are_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch_cli.assembly._fuse", lambda *_: pytest.fail("too late"))
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UsageError, match="--attention-backend torch has it"):
        load_for_engines(str(tiny_llama(tmp_path)), config)


def test_a_run_records_it_and_is_not_resumed_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tiny_llama(tmp_path / "model"), tmp_path / "out.parquet"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    run(
        str(prompts),
        model=str(folder),
        output=str(output),
        max_tokens=3,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="bfloat16",
    )
    note = json.loads(pq.read_metadata(output).metadata[b"cbatch.run"])
    assert note["config"]["engine"]["kv_cache_dtype"] == "bfloat16"
    assert note["resolved"]["engine"]["kv_cache_dtype"] == "bfloat16"
    options = ["-m", str(folder), "-o", str(output), "--device", "cpu", "--dtype", "float32"]
    assert main(["run", str(prompts), "--max-tokens", "3", *options]) == 3
    assert "kv_cache_dtype changed since" in capsys.readouterr().err


def test_doctor_tells_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-m", str(tiny_llama(tmp_path)), "--device", "cpu", "--dtype", "float32", "--json"]
    sizes = {}
    for dtype in ("auto", "bfloat16"):
        assert main(["doctor", "--kv-cache-dtype", dtype, *options]) == 0
        facts = json.loads(capsys.readouterr().out)["model"]["kv_cache"]
        sizes[facts["dtype"]] = facts["bytes_per_token"]
    assert sizes["float32"] == 2 * sizes["bfloat16"]
