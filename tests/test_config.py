"""Settings: where they come from, which wins, and what is refused."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cbatch_cli.config import (
    EngineConfig,
    JobConfig,
    build_job_config,
    parse_max_errors,
    resolved_dict,
    to_toml,
)
from cbatch_cli.config_values import parse_bytes
from cbatch_cli.errors import UsageError


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for key in list(os.environ):
        if key.startswith("CBATCH_"):
            monkeypatch.delenv(key)


@pytest.fixture
def toml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def build(**options: Any) -> JobConfig:
    return build_job_config({"inputs": ["in.jsonl"], **options})


def test_flag_beats_environment_beats_file(monkeypatch: pytest.MonkeyPatch, toml_file: Any) -> None:
    path = toml_file("max_tokens = 1\nlimit = 1\nmin_tokens = 1\n")
    monkeypatch.setenv("CBATCH_MAX_TOKENS", "2")
    monkeypatch.setenv("CBATCH_LIMIT", "2")
    config = build_job_config({"inputs": ["a"], "max_tokens": 3, "limit": None}, config_file=path)
    assert (config.max_tokens, config.limit, config.min_tokens) == (3, 2, 1)


def test_a_false_or_zero_option_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_CHAT", "true")
    monkeypatch.setenv("CBATCH_TEMPERATURE", "1")
    config = build(chat=False, temperature=0.0)
    assert config.chat is False
    assert config.temperature == 0.0


def test_engine_settings_are_flat_everywhere(
    monkeypatch: pytest.MonkeyPatch, toml_file: Any
) -> None:
    monkeypatch.setenv("CBATCH_BLOCK_SIZE", "8")
    path = toml_file("max-num-seqs = 4\nprefix_caching = false\n")
    engine = build_job_config({"inputs": ["a"], "seed": 7}, config_file=path).engine
    assert engine == EngineConfig(block_size=8, max_num_seqs=4, prefix_caching=False, seed=7)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("CBATCH_TOP_P", "0.5", "top_p", 0.5),
        ("CBATCH_TOP_P", "1", "top_p", 1.0),
        ("CBATCH_OVERWRITE", "1", "overwrite", True),
        ("CBATCH_OVERWRITE", "Off", "overwrite", False),
        ("CBATCH_STOP", "a,b", "stop", ("a,b",)),
        ("CBATCH_STOP", '["a", "\\n"]', "stop", ("a", "\n")),
        ("CBATCH_STOP_TOKEN_IDS", "7", "stop_token_ids", (7,)),
        ("CBATCH_STOP_TOKEN_IDS", "[7, 8]", "stop_token_ids", (7, 8)),
        ("CBATCH_MAX_LINE_BYTES", "1MiB", "max_line_bytes", 2**20),
        ("CBATCH_PROMPT_COLUMN", "5", "prompt_column", "5"),
        ("CBATCH_PROMPT_COLUMN", "", "prompt_column", None),
    ],
)
def test_environment_text_becomes_the_type_of_the_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    found = getattr(build(), field)
    assert found == value
    assert type(found) is type(value)


def test_the_cache_variable_is_not_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_CACHE", "/somewhere")
    assert build() == JobConfig(inputs=("in.jsonl",))


def test_unknown_environment_variable_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_MAX_TOKEN", "2")
    with pytest.raises(UsageError, match="'max_token' in the environment.*'max_tokens'"):
        build()


def test_unknown_toml_key_names_the_nearest_and_the_file(toml_file: Any) -> None:
    path = toml_file("temprature = 1.0\n")
    with pytest.raises(
        UsageError, match=r"'temprature' in .*job\.toml; did you mean 'temperature'"
    ):
        build_job_config({"inputs": ["a"]}, config_file=path)


def test_unknown_option_is_refused_even_without_a_value() -> None:
    with pytest.raises(UsageError, match="'zzzz' in the options$"):
        build(zzzz=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokens = '5'", "max_tokens must be an integer, not '5'"),
        ("max_tokens = 5.0", "max_tokens must be an integer, not 5.0"),
        ("max_tokens = true", "max_tokens must be an integer, not True"),
        ("temperature = true", "temperature must be a number, not True"),
        ("overwrite = 1", "overwrite must be true or false, not 1"),
        ("prompt_column = 5", "prompt_column must be text, not 5"),
        ("stop = [1]", r"stop must be a list of strings, not \[1\]"),
        ("stop_token_ids = ['a']", "stop_token_ids must be a list of integers"),
        ("kv_cache_memory = 'lots'", "kv_cache_memory must be a size such as 4GiB"),
        ("dtype = 'float64'", "dtype must be one of auto, float32"),
        ("dtype = 16", "dtype must be one of auto, float32"),
        ("max_tokens = ", "cannot read .*job.toml"),
    ],
)
def test_bad_toml_values_are_named(toml_file: Any, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_job_config({"inputs": ["a"]}, config_file=toml_file(text))


def test_a_missing_config_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        build_job_config({"inputs": ["a"]}, config_file=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": []}, "inputs must name at least one file"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"rows_per_part": 0}, "rows_per_part must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be an integer at least 1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens must be an integer"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"stop": [""]}, "stop must be a list of non-empty strings"),
        ({"template": "x", "prompt_column": "p"}, "template cannot be combined"),
        ({"messages_column": "m", "prompt_column": "p"}, "prompt_column cannot be combined"),
        ({"max_errors": "many"}, "max_errors must be a number of rows or a percentage"),
        ({"max_errors": "101%"}, "max_errors must be a number of rows or a percentage"),
        ({"output_column": ""}, "output_column must not be empty"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"step_timeout": 0.0}, "step_timeout must be above 0"),
        ({"device": "cuda:"}, "device must be auto, cpu, cuda or cuda:N"),
        ({"device": "auto:1"}, "device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(**options)


def test_min_tokens_may_pass_a_limit_that_the_model_sets() -> None:
    assert build(min_tokens=1000).sampling_options == {"min_tokens": 1000}


def test_sampling_options_are_the_given_ones() -> None:
    config = build(temperature=0.0, stop="x", ignore_eos=False, seed=3)
    assert config.sampling_options == {"temperature": 0.0, "stop": ("x",), "ignore_eos": False}


def test_paths_are_text() -> None:
    config = build_job_config({"inputs": [Path("a.jsonl")], "output": Path("b.parquet")})
    assert (config.inputs, config.output) == (("a.jsonl",), "b.parquet")


def test_toml_round_trip_of_every_setting(toml_file: Any) -> None:
    odd = 'q" \\ \n\t é 😀 \x7f'
    config = JobConfig(
        inputs=("a", odd),
        output="o.parquet",
        input_format="csv",
        template=odd,
        system=odd,
        chat=False,
        columns="a,b",
        limit=3,
        max_tokens=9,
        min_tokens=2,
        temperature=0.1,
        top_p=0.9,
        top_k=4,
        min_p=0.05,
        stop=(odd,),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        return_token_ids=True,
        overwrite=True,
        allow_errors=True,
        progress="json",
        engine=EngineConfig(
            seed=2**64 - 1, kv_cache_memory=2**30, device="cuda:1", dtype="float16"
        ),
    )
    assert build_job_config({}, config_file=toml_file(to_toml(config))) == config


def test_toml_leaves_out_what_is_not_set() -> None:
    config = JobConfig(inputs=("a",))
    found = tomllib.loads(to_toml(config))
    assert "max_tokens" not in found
    assert "engine" not in found
    assert found["rows_per_part"] == 16_384


def test_resolved_dict_holds_every_field() -> None:
    resolved = resolved_dict(JobConfig(inputs=("a",)))
    assert set(resolved) == {field.name for field in dataclasses.fields(JobConfig)}
    assert resolved["engine"]["seed"] == 0


@pytest.mark.parametrize(
    ("text", "limits"),
    [(None, (None, None)), ("0", (0, None)), ("12", (12, None)), ("2.5%", (None, 0.025))],
)
def test_max_errors_is_a_number_or_a_share(
    text: str | None, limits: tuple[int | None, float | None]
) -> None:
    assert parse_max_errors(text) == limits


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 * 2**30),
        ("4G", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5 KiB", 1536),
        ("2tib", 2 * 2**40),
        ("10", 10),
        ("10B", 10),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "4iB", "4 XB", "-1", "1e9", "4GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_bytes(text)
