"""Models that mean harm or are broken, from the command line: refused, or their rows fail."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import safetensors.torch

from cbatch_cli.cli import main
from tests.tiny_models import tiny_llama

ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
LOOP = "{% for i in range(10**9) %}{% set x = i %}{% endfor %}done"
BOMB = "{{ 'x' * 10**12 }}"
GROWTH = "{% for i in range(10**9) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}"
IMPORT = "{% include '/etc/passwd' %}"
CALL = "{{ cycler.__init__.__globals__.os.system('touch ran') }}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    Path("in.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return tiny_llama(folder)


def use_template(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)


def run(model: Path) -> int:
    options = ["--max-tokens", "2", "--device", "cpu", "--dtype", "float32"]
    return main(["run", "in.jsonl", "-o", "out.parquet", "-m", str(model), *options])


@pytest.mark.parametrize("template", [ESCAPE, LOOP, BOMB, GROWTH, IMPORT, CALL])
def test_a_hostile_chat_template_fails_its_rows_and_nothing_else(
    model: Path, template: str
) -> None:
    use_template(model, template)
    assert run(model) == 4
    (row,) = pq.read_table("out.parquet").to_pylist()
    assert row["error"]["type"] == "template_error"
    assert row["completion"] is None
    assert not Path("ran").exists()


def test_a_hostile_row_does_not_harm_the_others(model: Path) -> None:
    use_template(
        model,
        "{% if messages[0]['content'] == 'loop' %}"
        + LOOP
        + "{% endif %}{{ messages[0]['content'] }}",
    )
    chats = [[{"role": "user", "content": text}] for text in ("one", "loop", "two")]
    Path("in.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    assert run(model) == 4
    rows = pq.read_table("out.parquet").to_pylist()
    assert [row["error"] and row["error"]["type"] for row in rows] == [None, "template_error", None]
    assert [row["metrics"]["prompt_tokens"] for row in rows] == [3, 0, 3]


def test_a_chat_template_that_does_not_compile(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_template(model, "{% for %}")
    assert run(model) == 2
    assert not Path("out.parquet.cbatch").exists()
    assert "template" in capsys.readouterr().err


def test_conversations_for_a_model_that_takes_none(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if path.suffix == ".jinja":
            path.unlink(missing_ok=True)
        else:
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            path.write_text(json.dumps(settings))
    assert run(model) == 2
    assert "has no chat template, so it takes plain prompts only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("cut", "model.safetensors is cut short"),
        ("nan", "model.safetensors is damaged: the weight lm_head.weight holds NaN or infinity"),
        ("lost", "its files lack 1 of the weights of a llama model, lm_head.weight among them"),
        ("pickle", "has pickled weights only (pytorch_model.bin)"),
        ("no tokenizer", "has no tokenizer"),
        ("broken tokenizer", "cannot load the tokenizer"),
    ],
)
def test_a_broken_model_is_refused_in_one_line(
    model: Path, harm: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "pickle":
        path.rename(model / "pytorch_model.bin")
    elif harm == "nan":
        weights["lm_head.weight"][3, 3] = float("nan")
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    elif harm == "lost":
        del weights["lm_head.weight"]
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    elif harm == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
    else:
        (model / "tokenizer.json").write_text('{"version": "1.0"')
    assert run(model) == 2
    *before, told = capsys.readouterr().err.splitlines()
    assert before in ([], [f"loading {model}"])
    assert message in told and told.startswith("cbatch: error: ")
    assert not Path("out.parquet").exists() and not Path("out.parquet.cbatch").exists()
