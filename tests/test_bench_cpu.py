"""The suite of a CPU: what calls compute, where time goes, and which settings win."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels, KernelsUnavailable, load_kernels
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cbatch_cli import cpu_defaults
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.bench import cpu_suite
from cbatch_cli.bench.config import build_bench_config
from cbatch_cli.bench.cpu_ceilings import Ceilings, CeilingSizes, measure_ceilings
from cbatch_cli.bench.cpu_phases import (
    ProfiledRun,
    as_one_pass,
    in_float32,
    least_s,
    phase_measurements,
    roofline_measurements,
)
from cbatch_cli.bench.cpu_runs import TimedModel, load_timed
from cbatch_cli.bench.cpu_suite import CPUSizes, measure_sizes
from cbatch_cli.bench.cpu_sweep import SweepLimits, alternatives, cut_short, repeated, sweep
from cbatch_cli.bench.suite import Log, SuiteSettings, run_suite, suite_table
from cbatch_cli.bench.timed_kernels import (
    Call,
    CallRecorder,
    Precision,
    TimedBackend,
    TimedKernels,
    Work,
    attention_work,
)
from cbatch_cli.bench.workload import Workload
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.cpu_defaults import BUILT_IN, CPUDefaults
from cbatch_cli.models.packed_step import first_step_metadata
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.cpu_variants import variants
from tests.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_llama, tiny_model
from tests.tiny_tokenizers import save_byte_tokenizer

pytestmark = pytest.mark.skipif(not variants(), reason="the CPU kernels were not built")

VOCAB = 100
CEILINGS = Ceilings(read_bytes=10.0, float32_flops=100.0, w8a16_flops=200.0, w8a8_flops=400.0)
TINY = CPUSizes(
    ceilings=CeilingSizes(read_bytes=4096, rows=4, columns=32, depth=16, num_trials=2),
    sweep_seconds_per_round=5.0,
)


def no_log(line: str) -> None:
    pass


def calls() -> list[Call]:
    """Two steps: the second reads more than it computes."""
    return [
        Call(1, "linear", 4.0, Work(flops=300, num_bytes=10, num_columns=30)),
        Call(1, "add_norm", 0.5, Work()),
        Call(1, "attention", 1.0, Work(flops=100, num_bytes=15)),
        Call(2, "linear", 3.0, Work(flops=10, num_bytes=20, num_columns=30)),
        Call(
            2,
            "largest_int8_groups",
            1.5,
            Work(flops=400, num_bytes=5, precision="w8a8", num_columns=VOCAB, depth=1),
        ),
    ]


def test_the_phases_add_up() -> None:
    run = ProfiledRun(calls=calls(), wall_s=20.0, sampling_s=2.0, vocab_size=VOCAB)
    found = {entry.name: entry.value for entry in phase_measurements(run, CEILINGS)}
    shares = {
        "linears": 7.0,
        "head": 1.5,
        "attention": 1.0,
        "elementwise": 0.5,
        "sampling": 2.0,
        "Python and the rest": 8.0,
    }
    assert {name: found[name] for name in shares} == {
        name: pytest.approx(seconds / 20.0) for name, seconds in shares.items()
    }
    assert sum(shares.values()) == 20.0
    assert found["linears, rate"] == pytest.approx(310 / 7.0 / 1e9)
    assert found["linears, reading"] == pytest.approx(30 / 7.0 / 1e9)
    # Step 1 computes for 3 s and reads for 1; step 2 computes for 0.1 and reads for 2.
    assert found["linears, of the roofline"] == pytest.approx(5.0 / 7.0)
    assert found["attention, of the roofline"] == pytest.approx(1.5 / 1.0)
    # 1 s by the 8-bit rate; 0.5 s of reading.
    assert found["head, of the roofline"] == pytest.approx(1.0 / 1.5)


def test_the_roofline_takes_what_is_longer_in_each_step() -> None:
    assert least_s(calls(), CEILINGS) == pytest.approx(4.0 + 2.5)
    assert least_s([], CEILINGS) == 0.0
    in_w8a8 = Call(1, "linear_int8_groups", 1.0, Work(flops=1200, precision="w8a8"))
    assert least_s([in_w8a8], CEILINGS) == pytest.approx(3.0)
    # The head reads four bytes for each weight, and its 8-bit bound is no shortcut.
    assert least_s(in_float32(calls()), CEILINGS) == pytest.approx(4.0 + (20 + 4 * VOCAB) / 10)
    measured = list(roofline_measurements(calls(), CEILINGS, wall_s=13.0, is_float32=True))
    assert [entry.value for entry in measured] == pytest.approx([6.5, 0.5, 46.0, 46.0 / 13.0])
    measured = list(roofline_measurements(calls(), CEILINGS, wall_s=13.0, is_float32=False))
    assert [entry.value for entry in measured] == pytest.approx([6.5, 0.5])


def counted_by_torch(query_len: int, seq_len: int, spec: LayerSpec) -> int:
    """What torch counts for one position after the other over the keys that it sees."""
    group_size = spec.num_heads // spec.num_kv_heads
    with FlopCounterMode(display=False) as counter:
        for position in range(seq_len - query_len, seq_len):
            seen = min(position + 1, spec.sliding_window or seq_len)
            query = torch.ones(spec.num_kv_heads, group_size, spec.head_dim)
            scores = query @ torch.ones(spec.num_kv_heads, spec.head_dim, seen)
            _ = scores @ torch.ones(spec.num_kv_heads, seen, spec.value_head_dim)
    return counter.get_total_flops()


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
def test_what_attention_computes(window: int | None) -> None:
    spec = LayerSpec(
        index=0, num_heads=6, num_kv_heads=2, head_dim=5, value_head_dim=3, sliding_window=window
    )
    steps = [(1, 1), (1, 9), (7, 7), (5, 12), (3, 30), (10, 12)]
    for new, length in steps:
        work = attention_work(spec, [new], [length], itemsize=2)
        assert work.flops == counted_by_torch(new, length, spec)
        seen = {
            key
            for position in range(length - new, length)
            for key in range(max(0, position + 1 - (window or length)), position + 1)
        }
        assert work.num_bytes == len(seen) * 2 * (5 + 3) * 2
    together = attention_work(spec, *zip(*steps, strict=True), itemsize=2)
    alone = [attention_work(spec, [new], [length], itemsize=2) for new, length in steps]
    assert together.flops == sum(work.flops for work in alone)
    assert together.num_bytes == sum(work.num_bytes for work in alone)


class FakeKernels:
    """Kernels that take a second each by the clock of the test."""

    variant, panel = "fake", 8

    def __init__(self) -> None:
        self.linear = self.largest_int8 = self.pack_linear = lambda *_: None
        self.linear_bfloat16 = self.bits_beyond_bfloat16 = self.pack_linear_bfloat16 = self.linear


def test_calls_are_noted_while_the_recorder_is_on() -> None:
    recorder = CallRecorder(itertools.count().__next__)
    kernels = TimedKernels(FakeKernels(), recorder)
    linear = (0, 0, 3, 5, 0, 0, 7, 0, 0, 1)
    kernels.linear(*linear)
    with recorder.recording() as noted:
        recorder.begin_step()
        kernels.linear(*linear)
        kernels.pack_linear()
        kernels.linear_bfloat16(*linear)
        kernels.bits_beyond_bfloat16()
        kernels.pack_linear_bfloat16()
        recorder.begin_step()
        kernels.largest_int8(0, 0, 2, 5, 0, 0, 0, 9, 0, 0, 0, 0, 1)
    kernels.linear(*linear)
    assert noted == [
        Call(1, "linear", 1, Work(2 * 3 * 5 * 7, num_bytes=4 * 5 * 7, num_columns=7, depth=5)),
        Call(
            1,
            "linear_bfloat16",
            1,
            Work(2 * 3 * 5 * 7, num_bytes=2 * 5 * 7, num_columns=7, depth=5),
        ),
        Call(
            2,
            "largest_int8",
            1,
            Work(2 * 2 * 5 * 9, num_bytes=5 * 9, precision="w8a16", num_columns=9, depth=5),
        ),
    ]


class FakeBackend:
    """Attention that computes nothing."""

    def begin_step(self, metadata: object) -> None:
        pass

    def forward(self, layer: LayerSpec, *states: object) -> None:
        pass


def test_the_last_layer_of_one_pass_needs_only_the_rows_that_sample() -> None:
    """Of sequences of 9, 3 and 5 new tokens: two of the first, none of the second, the last."""
    recorder = CallRecorder(itertools.count().__next__)
    kernels = TimedKernels(FakeKernels(), recorder)
    specs = [
        LayerSpec(index=index, num_heads=2, num_kv_heads=1, head_dim=4, value_head_dim=4)
        for index in range(2)
    ]
    backend = TimedBackend(FakeBackend(), recorder, itemsize=4, last_layer=1)  # type: ignore[arg-type]
    metadata = first_step_metadata((9, 3, 5), 16, torch.device("cpu"))
    linear, head = (0, 0, 17, 5, 0, 0, 7), (0, 0, 3, 5, 0, 0, VOCAB)
    with recorder.recording() as noted:
        for sampling in ([16, 7, 8], []):
            backend.begin_step([metadata])
            recorder.sample_indices = sampling
            for spec in specs:
                kernels.linear(*linear)
                backend.forward(spec)
                kernels.linear(*linear)
            kernels.linear(*head[:2], len(sampling), *head[3:])
    works = [call.work for call in noted]
    needed = [call.work for call in as_one_pass(noted)]
    assert needed[:4] == works[:4] and needed[7:11] == works[7:11]
    # All scores of the three, then of what samples: 8 and 9 of the first, 5 of the last; each is
    # 16 operations of 2 heads. The first and the last read 14 positions of 32 bytes.
    assert works[4].flops == works[11].flops == (45 + 6 + 15) * 32
    assert needed[4] == Work(flops=(8 + 9 + 5) * 32, num_bytes=14 * 32)
    assert works[5] == Work(2 * 17 * 5 * 7, num_bytes=4 * 5 * 7, num_columns=7, depth=5)
    assert needed[5] == dataclasses.replace(works[5], flops=2 * 3 * 5 * 7)
    assert needed[6] == works[6] and works[6].flops == 2 * 3 * 5 * VOCAB
    assert not any(work.flops or work.num_bytes for work in needed[11:])


@pytest.fixture(scope="module")
def kernels() -> CPUKernels:
    return load_kernels()


def timed(folder: Path, config: EngineConfig, kernels: CPUKernels) -> TimedModel:
    rows = build_bench_config({"model": str(folder)}, num_prompts=5)
    return load_timed(str(folder), rows, config, kernels, no_log)


@pytest.mark.parametrize("quantization", ["none", "w8a16", "w8a8"])
def test_the_calls_of_a_run_are_the_products_of_the_model(
    tmp_path: Path, kernels: CPUKernels, quantization: str
) -> None:
    """By torch's count of the model's own linear layers, for all tokens at once."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        attention_backend="cpu",
        num_kv_blocks=200,
        quantization=quantization,  # type: ignore[arg-type]
        max_num_seqs=2,
        prefix_caching=False,
    )
    model = timed(save_tiny_model("gemma3", tmp_path), config, kernels)
    assert model.has_whole_layers
    plain = model.run(model.workload.requests, config)
    run = model.profile()
    requests = model.workload.requests
    num_answers = sum(request.params.max_tokens for request in requests)
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_tokens += num_answers - len(requests)  # the last of each is not computed on
    with FlopCounterMode(display=False) as counter:
        for module in model.loaded.model.module.model.modules():
            if isinstance(module, nn.Linear):
                weight = torch.empty(module.out_features, module.in_features)
                nn.functional.linear(torch.empty(num_tokens, module.in_features), weight)
    linears = run.calls_of("linears")
    assert sum(call.work.flops for call in linears) == counter.get_total_flops()
    assert model.is_one_pass
    last = model.loaded.model.module.model.layers[-1]
    pruned = [last.self_attn.o_proj, last.mlp.gate_proj, last.mlp.up_proj, last.mlp.down_proj]
    left_out = sum(2 * module.in_features * module.out_features for module in pruned)
    assert sum(call.work.flops for call in as_one_pass(linears)) == (
        counter.get_total_flops() - (num_tokens - num_answers) * left_out
    )
    head = run.calls_of("head")
    kernel = "largest_int8" if quantization == "w8a16" else "largest_int8_groups"
    assert {call.kernel for call in head} == {kernel}
    assert sum(call.work.flops for call in head) == 2 * num_answers * 32 * VOCAB_SIZE
    # Two float32 for the one group that a column has.
    bytes_per_column = 32 if quantization == "w8a16" else 32 + 8
    assert {call.work.num_bytes for call in head} == {bytes_per_column * VOCAB_SIZE}
    precisions = {call.work.precision for call in linears}
    assert precisions == {"float32" if quantization == "none" else quantization}
    assert max(call.step for call in run.calls) == plain.stats.num_steps
    specs = model.loaded.model.layer_specs
    assert sum(call.work.flops for call in run.calls_of("attention")) == sum(
        attention_work(spec, [length], [length], itemsize=4).flops
        for spec in specs
        for length in (
            len(request.prompt_token_ids) + request.params.max_tokens - 1 for request in requests
        )
    )
    assert run.calls_of("elementwise") and 0 < run.other_s < run.wall_s
    assert 0 < plain.outside_s < plain.stats.wall_s


def test_a_model_of_bfloat16_weights_reads_half_of_the_bytes(
    tmp_path: Path, kernels: CPUKernels
) -> None:
    tiny_model("gemma3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = EngineConfig(
        device="cpu", dtype="float32", attention_backend="cpu", num_kv_blocks=200, max_num_seqs=2
    )
    linears = timed(save_byte_tokenizer(tmp_path), config, kernels).profile().calls_of("linears")
    assert {call.kernel for call in linears} == {"linear_bfloat16"}
    assert {call.work.precision for call in linears} == {"float32"}
    for call in linears:
        assert call.work.num_bytes == 2 * call.work.depth * call.work.num_columns > 0


def test_ceilings_are_of_what_is_there(kernels: CPUKernels) -> None:
    ceilings = measure_ceilings(kernels, TINY.ceilings)
    rates = [ceilings.flops(precision) for precision in get_args(Precision)]
    assert min(ceilings.read_bytes, *rates) > 0
    assert ceilings.float32_by in ("our packed product", "torch's product")


def settings(folder: Path, *, repeat: int = 2, **engine: object) -> SuiteSettings:
    rows = build_bench_config({"model": str(folder), **engine}, num_prompts=4)
    return SuiteSettings(engine=rows.job.engine, model=str(folder), repeat=repeat, rows=rows)


def test_the_whole_suite_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: tmp_path / "stored")
    folder = tiny_llama(tmp_path / "llama")
    lines: list[str] = []

    def measure(settings: SuiteSettings, log: Log) -> object:
        return measure_sizes(settings, log, sizes=TINY)

    result = run_suite("cpu", settings(folder), lines.append, measure=measure)  # type: ignore[arg-type]
    assert json.loads(json.dumps(result)) == result
    ceilings, plain, phases, roofline, swept = result["sections"]
    assert ceilings["title"].startswith("Ceilings of ")
    assert [entry["unit"] for entry in ceilings["measurements"]] == ["GB/s", *["GFLOP/s"] * 3]
    assert "4 rows, float32, keys and values in float32: 32 sequences, 256 tokens" in plain["title"]
    found = {entry["name"]: entry["value"] for entry in plain["measurements"]}
    assert found["step occupancy while rows wait"] is None
    assert all(found[name] > 0 for name in ("output", "in and out", "steps", "Python, a step"))
    shares = {entry["name"]: entry["value"] for entry in phases["measurements"]}
    whole = ("linears", "head", "attention", "elementwise", "sampling", "Python and the rest")
    assert sum(shares[name] for name in whole) == pytest.approx(1.0)
    assert len(roofline["measurements"]) == 4, "the head is bounded by an 8-bit product"
    names = [entry["name"] for entry in swept["measurements"]]
    assert names[0] == str(BUILT_IN) and {str(one) for one in alternatives(())} < set(names)
    text = suite_table(result)
    assert text.startswith("suite cpu, ") and "best over the built-in" in text
    assert any("run 2 of 2" in line for line in lines)
    assert any("round 2 of 2" in line for line in lines)


def test_the_settings_are_swept_as_often_as_is_said_and_on_rows_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: tmp_path / "stored")
    folder = tiny_llama(tmp_path / "llama")
    lines: list[str] = []
    *_, swept = measure_sizes(settings(folder, repeat=1), lines.append, sizes=TINY)
    rounds = [line for line in lines if line.startswith("sweep: round")]
    assert len(rounds) == 1 and rounds[0].startswith("sweep: round 1 of 1 took")
    rows = "128 rows: those of made up, seed 0 over and over"
    assert any(line.startswith(f"sweep: 1 round of 5 settings on {rows}") for line in lines)
    assert swept.title.startswith(f"Settings, on {rows}")
    assert swept.title.endswith("; 1 round, tokens in and out, no prefix caching")
    assert swept.measurements[-1].note == "nothing is stored, which takes --repeat 2 or more"
    assert not (tmp_path / "stored").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_roofline_is_of_the_pass_that_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Transformers' own pass, as of a model that is not fused, computes all rows of all layers."""
    folder = save_tiny_model(name, tmp_path)
    monkeypatch.setattr(cpu_suite, "as_one_pass", lambda calls: [])
    sections = measure_sizes(settings(folder, repeat=1), no_log, sizes=TINY)
    *_, roofline = itertools.islice(sections, 4)
    assert roofline.title == "The products and attention of a plain run at the ceilings"
    assert (roofline.measurements[0].value == 0.0) is (name == "llama")


def test_a_sweep_has_time_by_its_rounds() -> None:
    """The rows of one round are cut as those of many are."""
    shares = [SweepLimits(num_rounds=n).seconds / n for n in (1, 3, 10)]
    assert shares == [100.0] * 3


def test_what_is_cut_of_the_rows_is_told() -> None:
    rows = [
        Request(key=RequestKey(row), prompt_token_ids=(1,), params=SamplingParams(max_tokens=1))
        for row in range(3)
    ]
    workload = Workload(name="a.jsonl", requests=tuple(rows))
    assert cpu_suite._rows_text(workload, 3, 1.0) == "3 rows: those of a.jsonl"
    cut = "128 rows: those of a.jsonl over and over, cut to 25% of their tokens"
    assert cpu_suite._rows_text(workload, 128, 0.25) == cut


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--device", "cuda"], "--device cuda"),
        (["--attention-backend", "triton"], "--attention-backend triton"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype fp8_e4m3"),
        (["--dtype", "bfloat16"], "--dtype bfloat16"),
        (["--overlap"], "--overlap"),
        (["--cuda-graphs"], "--cuda-graphs"),
        (["--no-deterministic"], "--no-deterministic"),
    ],
)
def test_what_cpu_kernels_do_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], given: list[str], named: str
) -> None:
    assert main(["bench", "--suite", "cpu", *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith(f"which {named} leaves out\n")


def test_without_kernels_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> None:
        raise KernelsUnavailable("a compiler is missing")

    monkeypatch.setattr(cpu_suite, "load_kernels", unavailable)
    assert main(["bench", "--suite", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.endswith("needs the compiled CPU kernels: a compiler is missing\n")


def test_a_suite_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "cpu", "--generate"]) == 2
    assert "neither schedulers nor generate" in capsys.readouterr().err


SMALL = CPUDefaults(max_num_batched_tokens=128)
LARGE = CPUDefaults(max_num_batched_tokens=512)
MANY = CPUDefaults(max_num_seqs=64)


def swept(rates: dict[CPUDefaults, list[float]], *, seconds: float = 1e9, run_s: float = 1.0):  # type: ignore[no-untyped-def]
    """The sweep over rates that are given round by round, each run of `run_s`."""
    now = 0.0
    remaining = {one: iter(values) for one, values in rates.items()}

    def measure(candidate: CPUDefaults) -> float:
        nonlocal now
        now += run_s
        return next(remaining[candidate])

    limits = SweepLimits(seconds_per_round=seconds / 3, num_rounds=3)
    candidates = [one for one in (SMALL, LARGE, MANY) if one in rates]
    return sweep(candidates, measure, limits, no_log, clock=lambda: now)


def test_only_a_clear_winner_replaces_what_is_built_in() -> None:
    base = [100.0, 100.0, 100.0]
    found = swept({BUILT_IN: base, SMALL: [104.0] * 3, LARGE: [90.0] * 3})
    assert found.best == BUILT_IN and found.speedup == 1.0 and found.num_rounds == 3
    assert found.rates == {BUILT_IN: 100.0, SMALL: 104.0, LARGE: 90.0}
    found = swept({BUILT_IN: base, SMALL: [106.0] * 3, LARGE: [110.0, 108.0, 120.0]})
    assert found.best == LARGE and found.speedup == pytest.approx(1.1)
    # A machine that was busy for the others is no merit.
    found = swept({BUILT_IN: base, SMALL: [120.0, 99.0, 120.0]})
    assert found.best == BUILT_IN


def test_what_won_apart_is_measured_together() -> None:
    both = CPUDefaults(max_num_batched_tokens=512, max_num_seqs=64)
    rates = {BUILT_IN: [100.0] * 6, SMALL: [107.0] * 3, LARGE: [110.0] * 3, MANY: [120.0] * 6}
    found = swept({**rates, both: [130.0] * 3})
    assert found.best == both and found.speedup == pytest.approx(1.3)
    assert swept({**rates, both: [115.0] * 3}).best == MANY


def test_a_sweep_ends_in_time() -> None:
    rates = {BUILT_IN: [100.0] * 3, SMALL: [120.0] * 3}
    assert swept(rates, seconds=7.0).best == SMALL
    assert swept(rates, seconds=4.0).best == SMALL
    found = swept(rates, seconds=3.9)
    assert found.best == BUILT_IN and found.num_rounds == 1
    assert found.rates == {BUILT_IN: 100.0, SMALL: 120.0}


def test_settings_are_changed_one_at_a_time() -> None:
    assert alternatives(()) == [
        SMALL,
        LARGE,
        MANY,
        CPUDefaults(block_size=16),
    ]
    fixed = ("max_num_batched_tokens", "max_num_seqs")
    assert alternatives(fixed) == [CPUDefaults(block_size=16)]


def test_rows_are_cut_alike() -> None:
    request = Request(
        key=RequestKey(3),
        prompt_token_ids=tuple(range(10)),
        params=SamplingParams(max_tokens=5, min_tokens=2, ignore_eos=True),
    )
    (cut,) = cut_short([request], 0.25)
    assert cut.prompt_token_ids == (0, 1, 2) and cut.params.max_tokens == 2
    assert cut.params.min_tokens == 0 and cut.params.ignore_eos and cut.key == request.key
    assert cut_short([request], 1.5) == [request]


def test_rows_are_repeated_until_they_fill_every_setting() -> None:
    rows = [
        Request(key=RequestKey(9), prompt_token_ids=(row,), params=SamplingParams(max_tokens=1))
        for row in range(3)
    ]
    found = repeated(rows, 5)
    assert [request.key.row for request in found] == [0, 1, 2, 3, 4]
    assert [request.prompt_token_ids[0] for request in found] == [0, 1, 2, 0, 1]
    assert len(repeated(rows, 2)) == 3
    assert len(repeated(rows)) == 128


def outcome_of(found: object, fixed: tuple[str, ...] = (), num_rounds: int = 3) -> str:
    key = cpu_defaults.key_for(quantization="none", dtype="float32", kv_dtype="float32")
    return cpu_suite._keep(key, found, fixed, SweepLimits(num_rounds=num_rounds))  # type: ignore[arg-type]


def test_what_is_made_of_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_defaults, "_folder", lambda: tmp_path / "stored")
    winner = swept({BUILT_IN: [100.0] * 3, SMALL: [120.0] * 3})
    assert "max_num_seqs was given" in outcome_of(winner, ("max_num_seqs",))
    nothing = swept({BUILT_IN: [100.0] * 3})
    assert outcome_of(nothing) == "the built-in settings stay"
    assert "second round" in outcome_of(swept({BUILT_IN: [1.0]}, seconds=0.5))
    assert "--repeat 2" in outcome_of(swept({BUILT_IN: [1.0] * 3}), num_rounds=1)
    assert not (tmp_path / "stored").exists()
    outcome = outcome_of(winner)
    (path,) = (tmp_path / "stored").iterdir()
    assert str(path) in outcome and "128 tokens a step" in outcome
    assert outcome_of(nothing).endswith("stored ones are gone") and not path.exists()
    (tmp_path / "stored").rmdir()
    (tmp_path / "stored").write_text("a file")
    assert "cannot be stored" in outcome_of(winner)
