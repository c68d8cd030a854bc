"""A job is resumed by what its options came to, not by how they were typed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cbatch_cli.config import EngineConfig
from cbatch_cli.data.fingerprint import as_begun, differences
from cbatch_cli.errors import ResumeMismatchError, RunInterruptedError
from tests.resuming import NUM_ROWS, WatchedRun, rows_of, write_jsonl

Typed = dict[str, Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", rows_of())


class Machine(WatchedRun):
    """Fills in what is left open, as a CPU does; a GPU is deterministic only when told."""

    def __init__(self, *, is_gpu: bool = False, stop_at_step: int | None = None) -> None:
        super().__init__(stop_at_step=stop_at_step)
        self._is_gpu = is_gpu

    def _load(self, model: str, config: EngineConfig, *log: Any) -> Any:
        engine = super()._load(model, config, *log)
        dtype = "float32" if config.dtype == "auto" else config.dtype
        resolved = {
            "dtype": dtype,
            "kv_cache_dtype": dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
            "batch_invariant": bool(config.deterministic)
            if self._is_gpu
            else config.deterministic is not False,
        }
        return dataclasses.replace(engine, description={**engine.description, **resolved})


def interrupt(source: Path, output: Path, typed: Typed, *, is_gpu: bool = False) -> None:
    with pytest.raises(RunInterruptedError):
        Machine(is_gpu=is_gpu, stop_at_step=20)(source, output, **typed)


SAME: list[tuple[Typed, Typed]] = [
    ({}, {"deterministic": True}),
    ({"deterministic": True}, {}),
    ({}, {"dtype": "float32"}),
    ({"dtype": "float32"}, {}),
    ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}),
    ({}, {"max_model_len": 4096}),
]
OTHER: list[tuple[Typed, Typed, str]] = [
    ({}, {"deterministic": False}, ": deterministic changed"),
    ({"deterministic": False}, {"deterministic": True}, ": deterministic changed"),
    ({"deterministic": False}, {}, ": resolved deterministic changed"),
    ({}, {"dtype": "bfloat16"}, ": dtype changed"),
    ({"dtype": "bfloat16"}, {}, ": resolved dtype changed"),
    ({"kv_cache_dtype": "bfloat16"}, {}, ": resolved kv_cache_dtype changed"),
    ({}, {"max_model_len": 4095}, ": max_model_len changed"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_what_comes_to_the_same_is_the_same_job(
    source: Path, tmp_path: Path, first: Typed, second: Typed
) -> None:
    output = tmp_path / "out.parquet"
    interrupt(source, output, first)
    interrupt(source, output, second)
    assert Machine()(source, output, **first)["rows"] == NUM_ROWS


@pytest.mark.parametrize(("first", "second", "message"), OTHER)
def test_what_comes_to_something_else_is_another_job(
    source: Path, tmp_path: Path, first: Typed, second: Typed, message: str
) -> None:
    output = tmp_path / "out.parquet"
    interrupt(source, output, first)
    with pytest.raises(ResumeMismatchError, match=message):
        Machine()(source, output, **second)
    assert Machine()(source, output, **first)["rows"] == NUM_ROWS


def test_on_a_gpu_it_makes_a_difference(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    interrupt(source, output, {}, is_gpu=True)
    with pytest.raises(ResumeMismatchError, match=": deterministic changed"):
        Machine(is_gpu=True)(source, output, deterministic=True)
    interrupt(source, output, {"deterministic": False}, is_gpu=True)
    promised = tmp_path / "promised.parquet"
    interrupt(source, promised, {"deterministic": True}, is_gpu=True)
    with pytest.raises(ResumeMismatchError, match=": resolved deterministic changed"):
        Machine(is_gpu=True)(source, promised)


def test_nothing_is_loaded_to_compare_with_a_job_that_is_done(source: Path, tmp_path: Path) -> None:
    output, promised = tmp_path / "out.parquet", tmp_path / "promised.parquet"
    Machine()(source, output, dtype="float32")
    Machine()(source, promised, deterministic=True)
    for path, typed in ((output, {"dtype": "float32", "deterministic": True}), (promised, {})):
        again = Machine()
        assert again(source, path, **typed)["already_done"] and again.num_loads == 0
    for path, typed in ((output, {}), (promised, {"deterministic": False})):
        again = Machine()
        with pytest.raises(ResumeMismatchError, match=": (dtype|deterministic) changed"):
            again(source, path, **typed)
        assert again.num_loads == 0


def test_a_run_that_did_not_put_down_what_it_came_to_is_compared_as_typed() -> None:
    typed, earlier = {"deterministic": True}, {"deterministic": None}
    assert as_begun(typed, earlier, {}, is_done=False) == (typed, [])


def test_shards_are_compared_alike() -> None:
    def shard(number: int, typed: bool | None, resolved: bool | None) -> dict[str, Any]:
        fingerprint = {"shard": f"{number}/2", "seed": 0, "deterministic": typed}
        settled = {"resolved sampling": {}, "resolved deterministic": resolved}
        return {"fingerprint": fingerprint, "settled": settled}

    assert differences(shard(0, None, True), shard(1, True, True)) == []
    assert differences(shard(0, None, False), shard(1, True, True)) == ["deterministic"]
    assert differences(shard(0, None, None), shard(1, True, None)) == ["deterministic"]
    other = shard(1, None, True)
    other["settled"]["resolved sampling"] = {"top_k": 3}
    other["fingerprint"]["seed"] = 1
    assert differences(shard(0, None, True), other) == ["resolved sampling", "seed"]
