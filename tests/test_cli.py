"""The command line: what reaches the job, what is printed where, and the exit status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cbatch_cli
from cbatch_cli import errors
from cbatch_cli.cli import main
from cbatch_cli.config import ENGINE_FIELDS, JOB_FIELDS, EngineConfig, JobConfig
from cbatch_cli.metrics import RunSnapshot

SAMPLES = Path(__file__).parent.parent / "sample_data"
GOLDEN = Path(__file__).parent / "golden"
SUMMARY: dict[str, Any] = {
    "rows": 24,
    "rows_ok": 22,
    "rows_failed": 2,
    "errors": {"empty_prompt": 1, "invalid_json": 1},
    "wall_s": 29.44,
    "load_s": 4.1,
    "prompt_tokens": 3100,
    "output_tokens": 1536,
    "output_tokens_per_s": 52.17,
    "total_tokens_per_s": 157.47,
    "ttft_s": {"p50": 0.1, "p90": None, "p99": float("nan")},
    "output": "prompts.results.parquet",
}
SNAPSHOT = RunSnapshot(
    elapsed_s=31.0,
    rows_done=1,
    rows_failed=0,
    rows_total=2,
    num_running=1,
    num_waiting=0,
    kv_cache_usage=0.5,
    prompt_tokens=9,
    output_tokens=9,
    eta_s=31.0,
)

RECORD_GOLDEN = bool(os.environ.get("RECORD_GOLDEN"))

Job = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(os.environ):
        if key.startswith("CBATCH_"):
            monkeypatch.delenv(key)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], list[JobConfig]]:
    """Puts a function in the place of the job; returns the list its configurations go to."""

    def install(function: Job) -> list[JobConfig]:
        configs: list[JobConfig] = []

        def run_job(config: JobConfig, **hooks: Any) -> dict[str, Any]:
            configs.append(config)
            return function(**hooks)

        module = types.ModuleType("cbatch_cli.job")
        module.run_job = run_job  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cbatch_cli.job", module)
        return configs

    return install


def succeed(on_progress: Any, log: Any, **_: Any) -> dict[str, Any]:
    log("a message")
    on_progress(SNAPSHOT)
    return SUMMARY | {"rows_ok": 24, "rows_failed": 0, "errors": {}}


def fail_some(on_progress: Any, log: Any, **_: Any) -> dict[str, Any]:
    return SUMMARY


def failing(error: BaseException) -> Job:
    def run(on_progress: Any, log: Any, **_: Any) -> dict[str, Any]:
        raise error

    return run


def test_every_option_reaches_its_setting(job: Any) -> None:
    configs = job(succeed)
    arguments = shlex.split(
        "run a.jsonl b.csv -o out.parquet -m org/model@main --input-format jsonl --columns a,b "
        "--limit 5 --shard 1/4 --max-line-bytes 1MiB --template {{a}} --system S --no-chat "
        "--max-tokens 7 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 "
        "--stop x --stop y --stop-token-id 4 --stop-token-id 5 --ignore-eos --seed 6 "
        "--max-num-seqs 8 --max-num-batched-tokens 64 --block-size 16 --kv-cache-memory 512MB "
        "--gpu-memory-utilization 0.5 --max-model-len 99 --dtype float16 --device cuda:1 "
        "--scheduler static --no-prefix-caching --trust-remote-code --output-column answer "
        "--rows-per-part 10 --return-token-ids --overwrite --no-resume --retry-errors "
        "--on-error fail --max-errors 5% --errors-file e.jsonl --step-timeout 60 --allow-errors "
        "--progress none"
    )
    assert main(arguments) == 0
    assert configs == [
        JobConfig(
            inputs=("a.jsonl", "b.csv"),
            output="out.parquet",
            model="org/model@main",
            input_format="jsonl",
            columns="a,b",
            limit=5,
            shard="1/4",
            max_line_bytes=2**20,
            template="{{a}}",
            system="S",
            chat=False,
            max_tokens=7,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            stop=("x", "y"),
            stop_token_ids=(4, 5),
            ignore_eos=True,
            output_column="answer",
            rows_per_part=10,
            return_token_ids=True,
            overwrite=True,
            no_resume=True,
            retry_errors=True,
            on_error="fail",
            max_errors="5%",
            errors_file="e.jsonl",
            allow_errors=True,
            progress="none",
            engine=EngineConfig(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                block_size=16,
                kv_cache_memory=512_000_000,
                gpu_memory_utilization=0.5,
                max_model_len=99,
                dtype="float16",
                device="cuda:1",
                scheduler="static",
                prefix_caching=False,
                seed=6,
                trust_remote_code=True,
                step_timeout=60.0,
            ),
        )
    ]


def test_every_setting_has_an_option() -> None:
    from cbatch_cli.cli import run

    without_option = (JOB_FIELDS | ENGINE_FIELDS) - set(run.__annotations__)
    assert without_option == {"num_kv_blocks", "prefix_caching"}  # tests; --no-prefix-caching


def test_options_not_given_keep_their_defaults(job: Any) -> None:
    configs = job(succeed)
    assert main(["run", "a.jsonl", "--prompt-column", "p"]) == 0
    assert main(["run", "a.jsonl", "--messages-column", "m"]) == 0
    assert configs == [
        JobConfig(inputs=("a.jsonl",), prompt_column="p"),
        JobConfig(inputs=("a.jsonl",), messages_column="m"),
    ]


def test_messages_and_the_summary_go_to_stderr(job: Any, capsys: Any) -> None:
    job(succeed)
    assert main(["run", "a.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "a message",
        "[00:31] 1/2 rows, ETA 00:31, 0 in 0 out tok/s, 1 run 0 wait, KV 50%",
        "answers  prompts.results.parquet",
        "rows     24: 24 ok, 0 failed",
        "tokens   3,100 in, 1,536 out",
        "speed    52.2 tokens/s out, 157.5 in and out",
        "time     29.4 s, and 4.1 s to load the model",
    ]


def test_failed_rows_are_counted_by_type_and_make_the_status_4(job: Any, capsys: Any) -> None:
    job(fail_some)
    assert main(["run", "a.jsonl"]) == 4
    assert (
        "rows     24: 22 ok, 2 failed (1 empty_prompt, 1 invalid_json)" in capsys.readouterr().err
    )
    assert main(["run", "a.jsonl", "--allow-errors"]) == 0


def test_json_prints_one_object_and_nothing_else_on_stdout(job: Any, capsys: Any) -> None:
    job(fail_some)
    assert main(["run", "a.jsonl", "--json"]) == 4
    out, err = capsys.readouterr()
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert found == SUMMARY | {"ttft_s": {"p50": 0.1, "p90": None, "p99": None}}
    assert out.count("\n") == 1
    assert err == ""


def test_progress_json_reports_events_for_programs(job: Any, capsys: Any) -> None:
    job(succeed)
    assert main(["run", "a.jsonl", "--progress", "json"]) == 0
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["message", "progress", "summary"]
    assert events[2]["rows_ok"] == 24
    assert out == ""


def test_quiet_prints_nothing_but_errors(job: Any, capsys: Any) -> None:
    job(succeed)
    assert main(["run", "a.jsonl", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    job(failing(errors.UsageError("no such file")))
    assert main(["run", "a.jsonl", "-q"]) == 2
    assert capsys.readouterr() == ("", "cbatch: error: no such file\n")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.UsageError("a\nb"), 2, "a b"),
        (errors.ModelError("no model"), 2, "no model"),
        (errors.ResumeMismatchError("x"), 3, "x"),
        (errors.OutputError("disk full"), 5, "disk full"),
        (errors.EngineError("x"), 6, "x"),
        (errors.OutputLockedError("x"), 7, "x"),
        (errors.TooManyErrorsError("x"), 8, "x"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ZeroDivisionError("by zero"),
            1,
            "internal error: ZeroDivisionError: by zero (-v shows the traceback)",
        ),
    ],
)
def test_what_ends_a_run_is_one_line_and_an_exit_status(
    job: Any, capsys: Any, error: BaseException, status: int, line: str
) -> None:
    job(failing(error))
    assert main(["run", "a.jsonl"]) == status
    assert capsys.readouterr() == ("", f"cbatch: error: {line}\n")


def test_verbose_shows_the_traceback(job: Any, capsys: Any) -> None:
    job(failing(ZeroDivisionError("by zero")))
    assert main(["run", "a.jsonl", "-v"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("cbatch: error: internal error: ZeroDivisionError: by zero\n")


def test_warnings_of_libraries_are_shown_on_demand(job: Any) -> None:
    def warn(on_progress: Any, log: Any, **_: Any) -> dict[str, Any]:
        warnings.warn("noise", stacklevel=1)
        return succeed(on_progress, log)

    job(warn)
    assert main(["run", "a.jsonl"]) == 0
    assert main(["run", "a.jsonl", "-v"]) == 1  # pytest makes a warning that is shown an error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "inputs must name at least one file"),
        (["run", "a", "--max-token", "3"], "No such option: --max-token"),
        (["run", "a", "--max-tokens", "x"], "'--max-tokens'"),
        (
            ["run", "a", "--max-tokens", "0"],
            "max_tokens must be an integer at least 1 and at most 2147483647, not 0",
        ),
        (["run", "a", "--dtype", "int8"], "Invalid value for '--dtype': 'int8' is not one of "),
        (["run", "a", "--quantization"], "requires an argument. (see cbatch run --help)"),
        (["doctor", "--device"], "requires an argument. (see cbatch doctor --help)"),
        (["run", "a", "--kv-cache-memory", "x"], "kv_cache_memory must be a size such as 4GiB"),
        (["run", "a", "--max-errors", "x"], "max_errors must be a number of rows or a percentage"),
        (["run", "a", "--shard", "4/4"], "shard must be i/n with 0 <= i < n, not 4/4"),
        (["run", "a", "--on-error", "stop"], "'--on-error'"),
        (["run", "a", "--step-timeout", "0"], "step_timeout must be above 0, not 0.0"),
        (["run", "a", "--config", "absent.toml"], "cannot read absent.toml"),
        (["walk"], "No such command 'walk'"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(
    job: Any, capsys: Any, arguments: list[str], message: str
) -> None:
    configs = job(succeed)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cbatch: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert configs == []


def test_dump_config_is_what_config_reads(
    job: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = job(succeed)
    monkeypatch.setenv("CBATCH_TOP_K", "9")
    options = ["a.jsonl", "--stop", '"\n', "--no-prefix-caching", "--seed", "3"]
    assert main(["run", *options, "--dump-config"]) == 0
    assert configs == []
    path = tmp_path / "job.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert tomllib.loads(path.read_text())["top_k"] == 9
    monkeypatch.delenv("CBATCH_TOP_K")
    assert main(["run", "--config", str(path), "--limit", "2"]) == 0
    assert configs == [
        JobConfig(
            inputs=("a.jsonl",),
            stop=('"\n',),
            top_k=9,
            limit=2,
            engine=EngineConfig(seed=3, prefix_caching=False),
        )
    ]


@pytest.mark.parametrize(
    ("name", "prompt", "rows"),
    [
        ("prompts.jsonl", "column 'prompt'", "not known before they are read"),
        ("chat.jsonl", "column 'messages' through the chat template", "not known"),
        ("questions.csv", "column 'question'", "not known"),
        ("openai_batch.jsonl", "the body of each OpenAI batch line", "not known"),
        ("prompts.parquet", "column 'prompt'", "6"),
        ("with_errors.jsonl", "column 'prompt'", "not known"),
    ],
)
def test_dry_run_opens_the_input_and_runs_nothing(
    job: Any, capsys: Any, name: str, prompt: str, rows: str
) -> None:
    configs = job(succeed)
    assert main(["run", str(SAMPLES / name), "--dry-run", "--top-k", "3"]) == 0
    out, err = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["prompt"] == prompt
    assert lines["rows"].startswith(rows)
    assert lines["sampling"] == "top_k=3"
    assert lines["output"].endswith(f"{name.partition('.')[0]}.results.parquet")
    assert (err, configs) == ("", [])


def test_dry_run_tells_of_a_limit(capsys: Any) -> None:
    name = str(SAMPLES / "prompts.jsonl")
    assert main(["run", name, "--limit", "1200", "--dry-run"]) == 0
    assert "rows     not known before they are read, at most 1,200\n" in capsys.readouterr().out
    assert main(["run", str(SAMPLES / "prompts.parquet"), "--limit", "4", "--dry-run"]) == 0
    assert "rows     4\n" in capsys.readouterr().out
    assert main(["run", name, "--limit", "4", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["limit"]) == (None, 4)


def test_dry_run_for_programs_and_its_errors(capsys: Any) -> None:
    name = str(SAMPLES / "prompts.parquet")
    assert main(["run", name, "-o", "x.parquet", "--columns", "weight", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["output_columns"])[:3] == ["weight", "row_index", "completion"]
    assert (found["rows"], found["output"], found["sampling"]) == (6, "x.parquet", {})
    assert main(["run", name, "--dry-run", "--template", "{{ weight }}"]) == 0
    assert "prompt   the template\n" in capsys.readouterr().out
    assert main(["run", name, "--dry-run", "--template", "{{ weight"]) == 2
    assert "--template does not compile" in capsys.readouterr().err
    assert main(["run", name, "--dry-run", "--prompt-column", "promt"]) == 2
    assert "did you mean 'prompt'" in capsys.readouterr().err


def test_version_and_no_command(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cbatch {cbatch_cli.__version__}\n"
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: cbatch")


def run_with_fake_job(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    code = (
        "import sys, types\n"
        "job = types.ModuleType('cbatch_cli.job')\n"
        f"job.run_job = lambda config, **hooks: {json.dumps(SUMMARY | {'ttft_s': 0})}\n"
        "sys.modules['cbatch_cli.job'] = job\n"
        "from cbatch_cli.__main__ import run\n"
        "run()\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_sleep_soon_unless_somebody_says_otherwise(
    settings: dict[str, str], expected: str | None
) -> None:
    code = (
        "import os, sys\n"
        "import cbatch_cli.__main__ as shell\n"
        "def main():\n"
        "    print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "    return 0\n"
        "shell.main = main\n"
        "shell.run()\n"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], env=env | settings, capture_output=True)
    assert done.stdout.decode().split() == [str(expected), "False"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["run", "a", "--json"], 4), (["run", "a", "--dump-config"], 0)],
)
def test_a_reader_of_stdout_that_is_gone_changes_nothing(arguments: list[str], status: int) -> None:
    process = run_with_fake_job(*arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == status
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in ("run", "bench", "status", "merge", "verify", "doctor")),
    ],
)
def test_help_is_as_recorded(
    arguments: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`RECORD_GOLDEN=1 python -m pytest tests/test_cli.py -k help` records it again."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    path = GOLDEN / ("_".join(["cbatch", *arguments[:-1], "help"]) + ".txt")
    if RECORD_GOLDEN:
        path.write_text(out, encoding="utf-8")
    assert out == path.read_text(encoding="utf-8")
