"""Suites of measurements: the table, the JSON, and which of them runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cbatch_cli.bench import gpu_suite, suite
from cbatch_cli.bench.gpu_engine import EngineSizes, idle_share, roofline_s
from cbatch_cli.bench.suite import Log, Measurement, Section, SuiteSettings, run_suite, suite_table
from cbatch_cli.cli import main
from cbatch_cli.config import EngineConfig
from cbatch_cli.errors import UsageError

SETTINGS = SuiteSettings(engine=EngineConfig(), model="org/model", repeat=2)


def measured(settings: SuiteSettings, log: Log) -> Iterator[Section]:
    log(f"measuring {settings.model}")
    yield Section(
        title="Speed",
        measurements=[
            Measurement(name="copy", value=4321.4, unit="GB/s"),
            Measurement(name="attention", value=0.7, unit="%", target=0.75),
            Measurement(name="idle", value=0.02, unit="%", target=0.03, at_most=True),
            Measurement(name="fp8", value=None, unit="%", target=0.5, note="the card has none"),
        ],
    )


def test_the_numbers_and_which_targets_they_miss() -> None:
    lines: list[str] = []
    result = run_suite("gpu", SETTINGS, lines.append, measure=measured)
    assert lines[0] == "measuring org/model" and lines[1].startswith("Speed: measured after ")
    (section,) = result["sections"]
    assert [entry["is_met"] for entry in section["measurements"]] == [None, False, True, None]
    assert json.loads(json.dumps(result)) == result
    assert suite_table({**result, "wall_s": 1.5, "cbatch_version": "1"}) == (
        "suite gpu, cbatch 1, 1.5 s\n"
        "\n"
        "Speed\n"
        "  copy       4,321 GB/s\n"
        "  attention       70.0%  (at least 75.0%, missed)\n"
        "  idle             2.0%  (at most 3.0%)\n"
        "  fp8                 -  (at least 50.0%) the card has none\n"
    )


def test_the_command_prints_the_table_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cbatch_cli.bench.gpu_suite.measure", measured)
    path = tmp_path / "suite.json"
    assert main(["bench", "--suite", "gpu", "-m", "org/m", "--json-file", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("suite gpu, ") and err.startswith("measuring org/m\n")
    result = json.loads(path.read_text())
    assert out == suite_table(result)
    assert main(["bench", "--suite", "gpu", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["sections"] == result["sections"] and err == ""

    def interrupted(settings: SuiteSettings, log: Log) -> Iterator[Section]:
        yield from measured(settings, log)
        raise KeyboardInterrupt

    path.unlink()
    monkeypatch.setattr("cbatch_cli.bench.gpu_suite.measure", interrupted)
    assert main(["bench", "--suite", "gpu", "--json-file", str(path)]) != 0
    left = json.loads(path.read_text())
    assert left["sections"] == result["sections"], "what was measured stays"
    assert result["complete"] is True and left["complete"] is False
    missing = tmp_path / "none" / "suite.json"
    assert main(["bench", "--suite", "gpu", "--json-file", str(missing)]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_suite_makes_its_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="makes models of its own"):
        list(gpu_suite.measure(SETTINGS, lambda _: None))


def test_every_suite_has_a_module() -> None:
    assert set(suite.SUITES) == set(suite._MODULES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_suite_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "gpu"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("needs a GPU, and torch finds none on this machine\n")
    assert err.count("\n") == 1


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert idle_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (9.0, 10.0)]) == pytest.approx(0.4)
    assert idle_share([(2.0, 3.0)]) == 0.0
    assert idle_share([]) is None


def test_the_roofline_counts_weights_once_a_step_and_keys_once_a_token() -> None:
    least_s = roofline_s(
        weight_bytes=100,
        kv_bytes_per_token=2.0,
        num_steps=3,
        context_lens=[5, 5, 6, 6],
        bytes_per_s=10.0,
    )
    assert least_s == (300 + 2 * 22) / 10


def test_the_whole_suite_on_tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the torch backend; the kernels' part runs under the interpreter elsewhere."""
    monkeypatch.setattr(gpu_suite, "kernel_errors", lambda *_, **__: iter(()))
    for name in ("decode_rate", "prefill_rate"):
        monkeypatch.setattr(gpu_suite, name, lambda *_, **__: 1e9)
    shape = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    sizes = gpu_suite.GPUSizes(
        copy_bytes=1024,
        matmul_size=16,
        shapes={"tiny": shape},
        engine=EngineSizes(
            num_requests=5,
            num_decoding=4,
            prompt_len=3,
            output_len=6,
            profiled_output_len=2,
            max_model_len=64,
        ),
    )
    engine = EngineConfig(
        num_kv_blocks=30, max_num_seqs=2, attention_backend="torch", dtype="float32"
    )
    settings = SuiteSettings(engine=engine, model="unused", repeat=2)
    sections = list(
        gpu_suite.measure_on(torch.device("cpu"), settings, lambda _: None, sizes=sizes)
    )
    assert [section.title for section in sections] == [
        "Ceilings of cpu",
        "Kernels against float64",
        "Attention, 32 heads, 8 of keys and values, 128 wide",
        "tiny in float32, random weights",
    ]
    found = {entry.name: entry for entry in sections[-1].measurements}
    assert found["2 rows decode, device idle"].value is None
    assert found["2 rows decode, step occupancy"].value == 1.0
    occupancy = found["mixed workload, step occupancy while rows wait"].value
    assert occupancy is not None and occupancy > 0.9
    for name, entry in found.items():
        assert entry.value is None or entry.value > 0, name
    text = suite_table(
        run_suite("gpu", settings, lambda _: None, measure=lambda *_: iter(sections))
    )
    assert "decode, 64 x 2,048 positions, of the copy" in text and "(at least 75.0%" in text
