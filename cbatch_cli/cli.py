"""The command line: parses, calls the job, maps errors to exit codes. Data goes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import cbatch_cli
from cbatch_cli import cli_actions
from cbatch_cli import cli_options as opt
from cbatch_cli import cli_output_options as output_opt
from cbatch_cli import doctor_options as doctor_opt
from cbatch_cli.bench import options as bench_opt
from cbatch_cli.bench.config import REPEAT, build_bench_config
from cbatch_cli.cli_help import SectionedCommand
from cbatch_cli.cli_outcome import (
    EXIT_USAGE,
    guarded,
    json_text,
    print_data,
    print_error,
)
from cbatch_cli.config import (
    ENGINE_FIELDS,
    JOB_FIELDS,
    build_job_config,
    to_toml,
)
from cbatch_cli.errors import UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (those of the process unless given).

    Returns the exit status; raises nothing that an argument, a row or a file could cause.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(given, prog_name="cbatch", standalone_mode=False)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "cbatch")
        # Typer reads choices by pydantic, which begins what it says like this.
        message = error.format_message().replace(": Value error, ", ": ", 1)
        print_error(f"{message} (see {command} --help)")
        return EXIT_USAGE
    return int(status or 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_data(f"cbatch {cbatch_cli.__version__}\n")
        raise typer.Exit


def _print_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        print_data(ctx.get_help() + "\n")
        raise typer.Exit


# Typer's own --help of a group loads pydantic, which takes as long as all the rest of the help.
@app.callback(invoke_without_command=True, add_help_option=False)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    help: Annotated[
        bool,
        typer.Option(
            "--help", "-h", callback=_print_help, is_eager=True, help="Show this message and exit."
        ),
    ] = False,
) -> int:
    """Run a file of prompts through a model: continuous batching in, Parquet out, no row lost."""
    if ctx.invoked_subcommand is not None:
        return 0
    print(ctx.get_help(), file=sys.stderr)
    return EXIT_USAGE


@app.command(cls=SectionedCommand)
def run(
    ctx: typer.Context,
    inputs: opt.Inputs = None,
    input_format: opt.InputFormatName = None,
    columns: opt.Columns = None,
    limit: opt.Limit = None,
    shard: opt.ShardText = None,
    max_line_bytes: opt.MaxLineBytes = None,
    prompt_column: opt.PromptColumn = None,
    messages_column: opt.MessagesColumn = None,
    template: opt.Template = None,
    system: opt.System = None,
    chat: opt.Chat = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    stop: opt.Stop = None,
    stop_token_ids: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEos = None,
    seed: opt.Seed = None,
    model: opt.Model = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    block_size: opt.BlockSize = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    kv_cache_dtype: opt.KVCacheDtype = None,
    gpu_memory_utilization: opt.GPUMemoryUtilization = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    attention_backend: opt.AttentionBackend = None,
    quantization: opt.Quantization = None,
    deterministic: opt.Deterministic = None,
    overlap: opt.Overlap = None,
    cuda_graphs: opt.CudaGraphs = None,
    scheduler: opt.Scheduler = None,
    no_prefix_caching: opt.NoPrefixCaching = False,
    trust_remote_code: opt.TrustRemoteCode = None,
    step_timeout: opt.StepTimeout = None,
    output: opt.Output = None,
    output_column: opt.OutputColumn = None,
    rows_per_part: opt.RowsPerPart = None,
    return_token_ids: opt.ReturnTokenIds = None,
    overwrite: opt.Overwrite = None,
    no_resume: opt.NoResume = None,
    retry_errors: opt.RetryErrors = None,
    on_error: opt.OnErrorName = None,
    max_errors: opt.MaxErrors = None,
    errors_file: opt.ErrorsFile = None,
    allow_errors: opt.AllowErrors = None,
    progress: opt.Progress = None,
    json_summary: opt.JsonSummary = False,
    config_file: opt.ConfigFile = None,
    dump_config: opt.DumpConfig = False,
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Answer every prompt of the inputs, one output row for each input row.

    Defaults of sampling come from the model's generation config; a row's own sampling_params
    column goes before the options.
    """

    def action() -> int:
        config = build_job_config(_settings(ctx), config_file=config_file)
        if dump_config:
            print_data(to_toml(config))
            return 0
        if dry_run:
            return cli_actions.dry_run(config, json_summary=json_summary)
        return cli_actions.run_job(config, json_summary=json_summary, quiet=quiet)

    return guarded(action, verbose=verbose)


@app.command(cls=SectionedCommand)
def bench(
    ctx: typer.Context,
    workload: bench_opt.Workload = None,
    num_prompts: bench_opt.NumPrompts = None,
    schedulers: bench_opt.Schedulers = None,
    with_generate: bench_opt.WithGenerate = False,
    repeat: bench_opt.Repeat = REPEAT,
    seed: bench_opt.Seed = None,
    suite: bench_opt.Suite = None,
    json_file: bench_opt.JsonFile = None,
    model: opt.Model = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    block_size: opt.BlockSize = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    kv_cache_dtype: opt.KVCacheDtype = None,
    gpu_memory_utilization: opt.GPUMemoryUtilization = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    attention_backend: opt.AttentionBackend = None,
    quantization: opt.Quantization = None,
    deterministic: opt.Deterministic = None,
    overlap: opt.Overlap = None,
    cuda_graphs: opt.CudaGraphs = None,
    no_prefix_caching: opt.NoPrefixCaching = False,
    trust_remote_code: opt.TrustRemoteCode = None,
    json_result: bench_opt.Json = False,
    config_file: opt.ConfigFile = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Measure throughput on a workload, continuous batching beside static.

    Every run starts with an empty KV cache, and loading the model does not count.
    """

    def action() -> int:
        if suite == "gpu" and (workload or num_prompts):
            raise UsageError("--suite gpu measures workloads of its own")
        if suite is not None and (schedulers or with_generate):
            raise UsageError("--suite compares neither schedulers nor generate")
        config = build_bench_config(
            _settings(ctx),
            inputs=workload or (),
            num_prompts=num_prompts,
            schedulers=schedulers,
            with_generate=with_generate,
            repeat=repeat,
            config_file=config_file,
        )
        return cli_actions.run_bench(
            config, suite=suite, json_result=json_result, json_file=json_file, quiet=quiet
        )

    return guarded(action, verbose=verbose)


@app.command(cls=SectionedCommand)
def status(
    output: output_opt.Target,
    as_json: output_opt.Json = False,
    verbose: opt.Verbose = False,
) -> int:
    """Tell where the run of an output stands, whether it is running, interrupted or done.

    Reads files only, and does not disturb a run. Of a job that is run in shards, tells of each.
    """

    def action() -> int:
        from cbatch_cli.status import read_status, status_dict, status_text

        statuses = read_status(output)
        print_data(json_text(status_dict(statuses)) if as_json else status_text(statuses))
        return 0

    return guarded(action, verbose=verbose)


@app.command(cls=SectionedCommand)
def merge(
    output: output_opt.MergeTarget,
    overwrite: opt.Overwrite = None,
    remove_shards: output_opt.RemoveShards = False,
    as_json: output_opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Check the outputs of all shards of a job and join them into one.

    It is then as if the job had been run without --shard, and its rows are in the same order.
    """

    def action() -> int:
        from cbatch_cli.merge import merge_shards
        from cbatch_cli.summary import summary_text

        summary = merge_shards(output, overwrite=bool(overwrite), remove_shards=remove_shards)
        if as_json:
            print_data(json_text(summary))
        elif not quiet:
            print(summary_text(summary), file=sys.stderr)
        return 0

    return guarded(action, verbose=verbose)


@app.command(cls=SectionedCommand)
def verify(
    ctx: typer.Context,
    output: output_opt.Target,
    rows: output_opt.NumRows = 16,
    seed: output_opt.DrawSeed = 0,
    inputs: output_opt.VerifyInputs = None,
    model: output_opt.VerifyModel = None,
    device: output_opt.VerifyDevice = None,
    attention_backend: output_opt.VerifyBackend = None,
    as_json: output_opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> int:
    """Run some rows of a finished output again, in another batch, and compare the answers.

    The settings are those in the output's metadata. Token ids are compared where they were kept,
    texts and finish reasons always. Exit status 4 if a row differs, 2 for an output that is not as
    the run wrote it, and for a model or an input that is not that of the run.
    """

    def action() -> int:
        changes = {"model": model, "device": device, "attention_backend": attention_backend}
        return cli_actions.run_verify(
            output,
            num_rows=rows,
            seed=seed,
            inputs=inputs or (),
            changes=changes,
            as_json=as_json,
            quiet=quiet,
        )

    return guarded(action, verbose=verbose)


@app.command(cls=SectionedCommand)
def doctor(
    ctx: typer.Context,
    model: doctor_opt.Model = None,
    max_model_len: opt.MaxModelLen = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    kv_cache_dtype: opt.KVCacheDtype = None,
    attention_backend: opt.AttentionBackend = None,
    quantization: opt.Quantization = None,
    deterministic: opt.Deterministic = None,
    trust_remote_code: opt.TrustRemoteCode = None,
    with_operations: doctor_opt.Operations = False,
    as_json: doctor_opt.Json = False,
    verbose: opt.Verbose = False,
) -> int:
    """Tell what this machine offers, and how a model is run on it.

    A model is loaded and checked as a run does, and refused with the same sentence.
    """

    def action() -> int:
        config = build_job_config({**_settings(ctx), "inputs": ("-",)})
        if with_operations and model is None:
            raise UsageError("--ops needs --model")
        return cli_actions.run_doctor(
            model, config.engine, with_operations=with_operations, as_json=as_json
        )

    return guarded(action, verbose=verbose)


def _settings(ctx: typer.Context) -> dict[str, Any]:
    """The job's and the engine's settings that were given as options."""
    # Typer gives an empty list for a repeatable option that was not given.
    options = {
        name: value
        for name, value in ctx.params.items()
        if name in JOB_FIELDS | ENGINE_FIELDS and value not in ((), [])
    }
    if ctx.params.get("no_prefix_caching"):
        options["prefix_caching"] = False
    return options
