"""Benchmarks: the workload, the contenders, what is measured and how it is shown."""

from __future__ import annotations

import json
import statistics
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch_cli.assembly import LoadedEngine, load_for_engines
from cbatch_cli.bench import runner
from cbatch_cli.bench.config import NUM_MADE_UP, BenchConfig, build_bench_config
from cbatch_cli.bench.contenders import GenerateContender, require_comparable
from cbatch_cli.bench.runner import run_bench
from cbatch_cli.bench.table import bench_table
from cbatch_cli.bench.workload import make_up_workload
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig, JobConfig
from cbatch_cli.engine.admission import StaticAdmission
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.errors import UsageError
from cbatch_cli.generation import TextGeneration
from tests.fakes import make_request, make_scheduler
from tests.null_engine import MAX_MODEL_LEN, NullRunner, NullTokenizer
from tests.tiny_models import tiny_llama

OUTPUT_LENS = (1, 2, 3, 2, 1, 30, 2, 1, 3, 2, 1, 2, 40, 1, 2, 3)


class NullModel:
    """In place of a `LoadedModel`."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(vocab_size=256, eos_token_ids=frozenset({0}))
        self.load_s = 1.5
        self.configs: list[EngineConfig] = []
        self.has_engine = False

    def load(self, name: str, config: EngineConfig) -> Any:
        return self

    def build_engine(self, config: EngineConfig, log: object = None) -> LoadedEngine:
        assert not self.has_engine, "the engine before must have been given back"
        self.has_engine = True
        self.configs.append(config)
        max_num_seqs = config.max_num_seqs or 4
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens or 64,
            "block_size": config.block_size or 16,
            "max_model_len": MAX_MODEL_LEN,
        }
        num_blocks = config.num_kv_blocks or 50 - len(self.configs)  # as memory comes and goes
        is_static = config.scheduler == "static"
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            prefix_caching=False,
            policy=StaticAdmission(max_num_seqs) if is_static else None,
            **limits,
        )
        return LoadedEngine(
            client=EngineCore(scheduler=scheduler, runner=NullRunner()),
            tokenizer=NullTokenizer(),  # type: ignore[arg-type]
            generation_defaults={},
            description={
                "model": "null",
                "dtype": "float32",
                "device": "cpu",
                "scheduler": config.scheduler,
                "num_blocks": num_blocks,
                **limits,
            },
            load_s=self.load_s,
        )

    def release_engine(self) -> None:
        self.has_engine = False

    def padded_generator(self) -> NullGenerator:
        return NullGenerator()


class NullGenerator:
    """Every row is 9, 9, 0 (EOS, if that is heeded), 9, 9 and so on."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        answer = [9, 9, 0, *[9] * max_new_tokens][:max_new_tokens]
        num_steps = 3 if eos_token_ids else max_new_tokens
        return [answer[:num_steps] for _ in prompts]


def write_workload(path: Path, output_lens: Sequence[int] = OUTPUT_LENS) -> str:
    with path.open("w") as file:
        for row, max_tokens in enumerate(output_lens):
            sampling = {"max_tokens": max_tokens, "ignore_eos": True}
            file.write(json.dumps({"prompt": f"prompt {row}", "sampling_params": sampling}) + "\n")
    return str(path)


def config_of(*inputs: str, **options: Any) -> BenchConfig:
    return build_bench_config({}, inputs=inputs, **options)


def test_continuous_batching_beats_static_on_rows_of_different_lengths(tmp_path: Path) -> None:
    config = config_of(write_workload(tmp_path / "w.jsonl"), repeat=3)
    result = run_bench(config, load=NullModel().load)
    assert result["workload"] == {
        "name": str(tmp_path / "w.jsonl"),
        "rows": len(OUTPUT_LENS),
        "prompt_tokens": sum(len(f"prompt {row}") for row in range(len(OUTPUT_LENS))),
        "max_output_tokens": sum(OUTPUT_LENS),
    }
    continuous, static = result["contenders"]["continuous"], result["contenders"]["static"]
    assert len(continuous["runs"]) == len(static["runs"]) == 3
    for found in (continuous, static):
        assert found["median"]["output_tokens"] == sum(OUTPUT_LENS)
        assert found["median"]["prompt_tokens"] == result["workload"]["prompt_tokens"]
    # A batch of four takes as many steps as its longest answer, and one for each further chunk.
    assert static["median"]["steps"] == 3 + 30 + 3 + 40
    assert continuous["min"]["steps"] == continuous["max"]["steps"] < 50
    assert continuous["median"]["step_occupancy"] > 1.5 * static["median"]["step_occupancy"]
    assert continuous["median"]["step_occupancy_until_tail"] > 0.9


def test_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    config = config_of(write_workload(tmp_path / "w.jsonl"), repeat=3, schedulers="static")
    result = run_bench(config, load=NullModel().load)
    (found,) = result["contenders"].values()
    speeds = [run["output_tokens_per_s"] for run in found["runs"]]
    assert len(set(speeds)) == 3
    assert found["median"]["output_tokens_per_s"] == pytest.approx(statistics.median(speeds))
    assert found["min"]["output_tokens_per_s"] == pytest.approx(min(speeds))
    assert found["max"]["output_tokens_per_s"] == pytest.approx(max(speeds))
    for run in found["runs"]:
        assert run["output_tokens"] / run["wall_s"] == pytest.approx(
            run["output_tokens_per_s"], rel=0.1
        )
        assert {"schedule", "update", "other"} <= set(run["phase_shares"])
        assert run["phase_shares"]["update"] == pytest.approx(
            run["phases_s"]["update"] / run["wall_s"], rel=0.2
        )


def test_runs_take_turns_with_equal_sizes_and_one_engine_at_a_time(tmp_path: Path) -> None:
    model, lines = NullModel(), []
    config = config_of(write_workload(tmp_path / "w.jsonl"), repeat=2)
    run_bench(config, load=model.load, log=lines.append)
    measured = model.configs[-4:]
    assert [c.scheduler for c in measured] == ["continuous", "static"] * 2
    assert {(c.num_kv_blocks, c.max_num_seqs, c.block_size) for c in measured} == {(49, 4, 16)}
    assert [line.partition(":")[0] for line in lines] == [
        f"run {number} of 2, {name}" for number in (1, 2) for name in ("continuous", "static")
    ]
    assert not model.has_engine


def test_files_are_cut_short_and_settings_of_a_job_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"q": "ab"}\n' * 9)
    monkeypatch.setenv("CBATCH_PROMPT_COLUMN", "q")
    monkeypatch.setenv("CBATCH_MAX_TOKENS", "3")
    result = run_bench(config_of(str(path), num_prompts=5, repeat=1), load=NullModel().load)
    assert result["workload"]["rows"] == 5
    assert result["workload"]["prompt_tokens"] == 10
    assert result["contenders"]["static"]["median"]["output_tokens"] == 15


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.csv", "prompt\n", "the workload has no rows"),
        ("w.csv", 'prompt\na\n""\n', "row 1 of the workload cannot be run: empty_prompt"),
        ("w.jsonl", '{"prompt": "' + "x" * 5000 + '"}\n', "prompt_too_long"),
        ("w.jsonl", '{"other": "a"}\n', "other"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        run_bench(config_of(str(path)), load=NullModel().load)


def test_rows_that_are_made_up() -> None:
    options: dict[str, Any] = {"vocab_size": 500, "max_sequence_tokens": 4096}
    workload = make_up_workload(1000, seed=1, **options)
    assert workload == make_up_workload(1000, seed=1, **options)
    assert workload.requests != make_up_workload(1000, seed=2, **options).requests
    assert [request.key.row for request in workload.requests] == list(range(1000))
    prompt_lens = sorted(len(request.prompt_token_ids) for request in workload.requests)
    output_lens = sorted(request.params.max_tokens for request in workload.requests)
    assert prompt_lens[0] >= 1 and 80 < prompt_lens[500] < 150 and prompt_lens[-1] > 1000
    assert output_lens[0] >= 1 and 15 < output_lens[500] < 40 and output_lens[-1] == 400
    # A tenth of the rows makes more than a third of the tokens.
    assert sum(output_lens[900:]) > workload.max_output_tokens / 3
    token_ids = {i for request in workload.requests for i in request.prompt_token_ids}
    assert token_ids == set(range(500))
    assert all(r.params.ignore_eos and r.params.is_greedy for r in workload.requests)


@pytest.mark.parametrize("max_sequence_tokens", [2, 3, 64])
def test_made_up_rows_fit_the_engine(max_sequence_tokens: int) -> None:
    workload = make_up_workload(50, seed=0, vocab_size=9, max_sequence_tokens=max_sequence_tokens)
    for request in workload.requests:
        num_tokens = len(request.prompt_token_ids) + request.params.max_tokens
        assert 2 <= num_tokens <= max_sequence_tokens


def test_without_files_rows_are_made_up() -> None:
    result = run_bench(config_of(num_prompts=7, repeat=1), load=NullModel().load)
    assert result["workload"]["rows"] == 7
    assert result["workload"]["name"] == "made up, seed 0"
    assert config_of().num_made_up == NUM_MADE_UP


def test_generate_counts_a_row_up_to_its_own_end() -> None:
    contender = GenerateContender(NullModel(), batch_size=2)  # type: ignore[arg-type]
    requests = [
        make_request(row, [5, 6], max_tokens=max_tokens, ignore_eos=True)
        for row, max_tokens in enumerate((1, 4, 2))
    ]
    found = contender.run(requests)
    assert found["prompt_tokens"] == 6 and found["output_tokens"] == 1 + 4 + 2
    assert found["steps"] == 4 + 2
    assert found["step_occupancy"] == pytest.approx(7 / (6 * 2), abs=1e-4)
    requests = [make_request(row, [5], max_tokens=5) for row in range(2)]
    assert contender.run(requests)["output_tokens"] == 3 + 3  # 9, 9 and EOS


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"stop": ("x",)},
        {"stop_token_ids": (3,)},
        {"min_tokens": 1},
        {"ignore_eos": True},
    ],
)
def test_rows_that_generate_would_end_elsewhere_are_refused(params: dict[str, Any]) -> None:
    requests = [make_request(0, [1]), make_request(7, [1], **params)]
    require_comparable(requests[:1] * 2)
    with pytest.raises(UsageError, match="row 7 of the workload"):
        require_comparable(requests)


def test_a_real_model_with_all_contenders(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    lens = (3, 8, 2, 5, 9, 1)
    options = {"model": str(folder), "dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    config = build_bench_config(
        options, inputs=(write_workload(tmp_path / "w.jsonl", lens),), with_generate=True, repeat=1
    )
    result = run_bench(config)
    assert list(result["contenders"]) == ["continuous", "static", "generate"]
    for found in result["contenders"].values():
        assert found["median"]["output_tokens"] == sum(lens)
        assert found["median"]["prompt_tokens"] == result["workload"]["prompt_tokens"]
    assert result["contenders"]["generate"]["median"]["steps"] == 8 + 5 + 9
    assert result["resolved"]["engine"]["max_num_seqs"] == 2


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_padded_generate_and_the_engine_agree_token_for_token(
    tmp_path: Path, ignore_eos: bool
) -> None:
    loaded = load_for_engines(str(tiny_llama(tmp_path)), EngineConfig(dtype="float32"))
    prompts = [[7], list(range(40, 60)), [3, 1, 4, 1, 5], list(range(90, 100))]
    generator = loaded.padded_generator()
    free = generator.generate(prompts, max_new_tokens=24)
    # An id in the middle of the first answer stands in for EOS: the weights are random.
    eos_token_ids = frozenset({free[0][9]})
    padded = free
    if not ignore_eos:
        loaded.model.eos_token_ids = eos_token_ids
        padded = generator.generate(prompts, max_new_tokens=24, eos_token_ids=eos_token_ids)
    engine = loaded.build_engine(EngineConfig(max_num_seqs=3, block_size=4))
    requests = [
        make_request(row, prompt, max_tokens=24, ignore_eos=ignore_eos)
        for row, prompt in enumerate(prompts)
    ]
    lengths = set()
    for output in engine.client.generate(requests):
        answer = padded[output.key.row]
        assert list(output.token_ids) == answer[: len(output.token_ids)]
        at_end = output.token_ids[-1] in eos_token_ids and not ignore_eos
        assert len(output.token_ids) == 24 or at_end
        lengths.add(len(output.token_ids))
    assert (min(lengths) < 24) is not ignore_eos


def test_an_engine_given_back_leaves_no_cache_behind(tmp_path: Path) -> None:
    loaded = load_for_engines(str(tiny_llama(tmp_path)), EngineConfig(dtype="float32"))
    engine = loaded.build_engine(EngineConfig(max_num_seqs=2, num_kv_blocks=8))
    assert isinstance(engine.client, EngineCore)
    core = weakref.ref(engine.client)
    generation = TextGeneration(engine.client, engine.tokenizer)
    assert len(list(generation.generate([make_request(0, [1, 2], max_tokens=2)]))) == 1
    del engine, generation
    loaded.release_engine()
    assert core() is None
    binding = [name for m in loaded.model._model.modules() for name in vars(m) if "binding" in name]
    assert binding == []


RESULT: dict[str, Any] = {
    "workload": {
        "name": "w.jsonl",
        "rows": 1096,
        "prompt_tokens": 18797,
        "max_output_tokens": 4969,
    },
    "resolved": {
        "engine": {
            "model": "tiny",
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
        }
    },
    "repeat": 3,
    "contenders": {
        "continuous": {
            kind: {
                "output_tokens_per_s": 25.0 + change,
                "steps": 512,
                "step_occupancy_until_tail": None,
                "phase_shares": {"forward": 0.9, "sample": 0.04 + change / 100, "other": 0.05},
            }
            for kind, change in (("median", 0.0), ("min", -1.0), ("max", 2.0))
        },
        "generate": {
            kind: {"output_tokens_per_s": 5.13, "steps": 2000} for kind in ("median", "min", "max")
        },
    },
}


def test_the_table() -> None:
    lines = bench_table(RESULT).splitlines()
    assert lines[:3] == [
        "workload  w.jsonl: 1,096 rows, 18,797 tokens in, at most 4,969 out",
        "engine    tiny in float32 on cpu, 32 sequences, 256 tokens a step",
        "numbers   median of 3 runs (lowest - highest)",
    ]
    assert lines[4].split() == ["continuous", "generate"]
    assert lines[5].split("  ")[0] == "output tokens/s"
    assert lines[5].endswith("25.0 (24.0 - 27.0)       5.1")
    assert any(line.split() == ["steps", "512", "2,000"] for line in lines)
    assert any(line.split() == ["while", "somebody", "waits", "-", "-"] for line in lines)
    assert [line.split()[0] for line in lines[-3:]] == ["forward", "sample", "other"]
    assert lines[-2].endswith("4.0% (3.0% - 6.0%)         -")
    assert len({len(line) for line in lines[5:] if line.endswith("-")}) == 1
    once = bench_table(RESULT | {"repeat": 1}).splitlines()
    assert once[2] == "numbers   one run"


def captured(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    configs: list[BenchConfig] = []

    def fake(config: BenchConfig, *, log: Any) -> dict[str, Any]:
        configs.append(config)
        log("run 1 of 1")
        return RESULT

    monkeypatch.setattr(runner, "run_bench", fake)
    return configs


def test_every_option_reaches_its_setting(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    configs = captured(monkeypatch)
    options = "--num-prompts 9 --schedulers static --generate --repeat 5 --seed 4 -m org/m "
    options += "--max-num-seqs 8 --block-size 16 --no-prefix-caching --dtype float32"
    assert main(["bench", "a.jsonl", "b.jsonl", *options.split()]) == 0
    assert configs == [
        BenchConfig(
            job=JobConfig(
                inputs=("a.jsonl", "b.jsonl"),
                limit=9,
                model="org/m",
                engine=EngineConfig(
                    max_num_seqs=8, block_size=16, prefix_caching=False, dtype="float32", seed=4
                ),
            ),
            schedulers=("static",),
            with_generate=True,
            repeat=5,
        )
    ]
    out, err = capsys.readouterr()
    assert out == bench_table(RESULT) and err == "run 1 of 1\n"


def test_json_is_one_object_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    configs = captured(monkeypatch)
    assert main(["bench", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == RESULT and out.count("\n") == 1 and err == ""
    (config,) = configs
    assert config.num_made_up == NUM_MADE_UP
    assert config.schedulers == ("continuous", "static") and config.repeat == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--schedulers fast", "schedulers must be of continuous, static, not 'fast'"),
        ("--schedulers static,static", "schedulers must differ"),
        ("--schedulers ,", "schedulers must name at least one"),
        ("--repeat 0", "repeat must be at least 1"),
        ("--num-prompts 0", "num_prompts must be at least 1"),
        ("--scheduler static", "No such option: --scheduler"),
        ("--max-num-seqs 0", "max_num_seqs must be at least 1"),
    ],
)
def test_bad_options_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, options: str, message: str
) -> None:
    configs = captured(monkeypatch)
    assert main(["bench", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
    assert configs == []


def test_a_suite_measures_what_it_likes(capsys: Any) -> None:
    assert main(["bench", "--suite", "gpu", "--num-prompts", "3"]) == 2
    assert "--suite gpu measures workloads of its own" in capsys.readouterr().err


def test_only_generate_may_run() -> None:
    config = config_of(schedulers="", with_generate=True, num_prompts=2, repeat=1)
    result = run_bench(config, load=NullModel().load)
    assert list(result["contenders"]) == ["generate"]
