"""Defaults that were measured on this machine: who goes before them, and what is ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cbatch_cli import cpu_defaults
from cbatch_cli.assembly import LoadedModel, load_for_engines
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig, build_job_config
from cbatch_cli.cpu_defaults import (
    BUILT_IN,
    CPUDefaults,
    DefaultsKey,
    forget_defaults,
    key_for,
    read_defaults,
    store_defaults,
)
from tests.tiny_models import tiny_llama

FAST = CPUDefaults(max_num_batched_tokens=128, max_num_seqs=64, block_size=16)
PRECISION = {"quantization": "none", "dtype": "float32", "kv_dtype": "float32"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: tmp_path / "cpu-defaults")
    return tmp_path / "cpu-defaults"


@pytest.fixture
def key() -> DefaultsKey:
    return key_for(**PRECISION)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_llama(tmp_path_factory.mktemp("llama"))
    return load_for_engines(str(folder), EngineConfig(device="cpu", dtype="float32"))


def sizes(loaded: LoadedModel, config: EngineConfig) -> tuple[int, int, int]:
    """Sequences, tokens a step and block size of an engine."""
    config = dataclasses.replace(config, device="cpu", dtype="float32", num_kv_blocks=64)
    lines: list[str] = []
    engine = loaded.build_engine(config, lines.append)
    loaded.release_engine()
    names = ("max_num_seqs", "max_num_batched_tokens", "block_size")
    first, second, third = (engine.description[name] for name in names)
    return first, second, third


def test_a_setting_that_is_given_goes_before_a_measured_one(
    llama: LoadedModel, key: DefaultsKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sizes(llama, EngineConfig()) == (32, 256, 64)
    store_defaults(key, FAST, speedup=1.2)
    assert sizes(llama, EngineConfig()) == (64, 128, 16)
    toml = tmp_path / "job.toml"
    toml.write_text("max_num_seqs = 5\nmax_num_batched_tokens = 99\nblock_size = 8\n")
    monkeypatch.setenv("CBATCH_MAX_NUM_SEQS", "6")
    monkeypatch.setenv("CBATCH_MAX_NUM_BATCHED_TOKENS", "100")
    job = build_job_config({"inputs": ("-",), "max_num_seqs": 7}, config_file=toml)
    assert sizes(llama, job.engine) == (7, 100, 8)
    assert sizes(llama, EngineConfig(max_num_seqs=7)) == (7, 128, 16)
    assert forget_defaults(key) and not forget_defaults(key)
    assert sizes(llama, EngineConfig()) == (32, 256, 64)


@pytest.mark.parametrize("other", [{"kv_dtype": "bfloat16"}, {"quantization": "w8a16"}])
def test_another_precision_has_defaults_of_its_own(
    llama: LoadedModel, other: dict[str, str]
) -> None:
    store_defaults(key_for(**{**PRECISION, **other}), FAST, speedup=1.2)
    assert sizes(llama, EngineConfig()) == (32, 256, 64)
    if "kv_dtype" in other:
        assert sizes(llama, EngineConfig(kv_cache_dtype="bfloat16")) == (64, 128, 16)


def test_what_was_stored_is_read_again(key: DefaultsKey) -> None:
    assert read_defaults(key, pytest.fail) is None
    path = store_defaults(key, FAST, speedup=1.23456)
    stored = read_defaults(key, pytest.fail)
    assert stored is not None and stored.values == FAST and stored.speedup == 1.235
    assert stored.measured_at[:2] == "20"
    assert path == key.path and [path] == list(path.parent.iterdir())
    store_defaults(key, BUILT_IN, speedup=1.0)
    again = read_defaults(key, pytest.fail)
    assert again is not None and again.values == BUILT_IN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "\x00\xff",
        "[" * 100_000,
        {},
        {"values": None},
        {"values": {"max_num_seqs": 64, "surprise": 1}},
        {"values": {"max_num_seqs": 10**12}},
        {"values": {"max_num_seqs": True}},
        {"values": {"max_num_seqs": 64.0}},
        {"values": {"block_size": "64"}},
        {"values": {"max_num_batched_tokens": 0}},
        {"for": {"processor": "another"}},
        {"speedup": None},
    ],
)
def test_nonsense_is_ignored_with_one_line(
    llama: LoadedModel, key: DefaultsKey, text: str | dict[str, object]
) -> None:
    path = store_defaults(key, FAST, speedup=1.2)
    if isinstance(text, dict):
        text = json.dumps({**json.loads(path.read_text()), **text} if text else {})
    path.write_bytes(text.encode("latin-1"))
    lines: list[str] = []
    assert read_defaults(key, lines.append) is None
    assert len(lines) == 1 and "ignored" in lines[0] and "\n" not in lines[0]
    assert sizes(llama, EngineConfig()) == (32, 256, 64)


def test_a_folder_in_its_place_is_ignored_too(key: DefaultsKey) -> None:
    key.path.mkdir(parents=True)
    lines: list[str] = []
    assert read_defaults(key, lines.append) is None
    assert len(lines) == 1


def test_without_a_home_nothing_is_stored(
    key: DefaultsKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpu_defaults, "_folder", homeless)
    lines: list[str] = []
    assert read_defaults(key, lines.append) is None
    assert len(lines) == 1


def test_the_doctor_tells_of_them(key: DefaultsKey, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "defaults     built in\n" in capsys.readouterr().out
    other = dataclasses.replace(key, cbatch_version="0.0.0")
    store_defaults(other, dataclasses.replace(FAST, max_num_seqs=32), speedup=1.2)
    assert main(["doctor"]) == 0
    assert "defaults     built in\n" in capsys.readouterr().out, "of another version"
    store_defaults(key, FAST, speedup=1.2)
    (key.path.parent / "foreign.json").write_text("{")
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("defaults")]
    assert "64 sequences, 128 tokens a step, blocks of 16 with float32" in line
    assert "measured 20" in line and ";" not in line
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["environment"]["cpu_defaults"]
    assert facts[key.precision]["max_num_seqs"] == 64
