"""The options of `cbatch run`, one annotated type each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbatch_cli.cli_help import choices, flag, option
from cbatch_cli.config import (
    AttentionBackendChoice,
    DtypeName,
    InputFormat,
    KVCacheDtypeName,
    OnError,
    ProgressName,
    QuantizationName,
    SchedulerName,
)

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT",
        help="Files, folders, globs or URLs of prompts: JSON Lines, CSV, TSV, Parquet or OpenAI "
        "batch lines, compressed or not; - is standard input.",
        rich_help_panel="Input",
        show_default=False,
    ),
]
InputFormatName = Annotated[
    InputFormat | None,
    option("Input", "--input-format", choices(InputFormat), "Format of the inputs."),
]
Columns = Annotated[
    str | None,
    option("Input", "--columns", "all|none|A,B", "Input columns that are copied to the output."),
]
Limit = Annotated[int | None, option("Input", "--limit", "N", "Read the first N rows only.")]
ShardText = Annotated[
    str | None,
    option(
        "Input",
        "--shard",
        "I/N|slurm",
        "Run the share I of N only, from 0, into OUT.shard-I-of-N; cbatch merge joins them. "
        "slurm takes both numbers from the job array that this is a task of.",
    ),
]
MaxLineBytes = Annotated[
    str | None, option("Input", "--max-line-bytes", "SIZE", "A longer line is a row with an error.")
]

PromptColumn = Annotated[
    str | None,
    option(
        "Prompts",
        "--prompt-column",
        "NAME",
        "Column that holds the prompt. Without it the first of messages, prompt, text, "
        "instruction (+ input) and question that exists is used.",
    ),
]
MessagesColumn = Annotated[
    str | None,
    option("Prompts", "--messages-column", "NAME", "Column that holds a list of chat messages."),
]
Template = Annotated[
    str | None,
    option(
        "Prompts",
        "--template",
        "TEXT|@FILE",
        "Jinja template over the row's columns that makes the prompt.",
    ),
]
System = Annotated[str | None, option("Prompts", "--system", "TEXT", "System message of a chat.")]
Chat = Annotated[
    bool | None,
    flag(
        "Prompts",
        "--chat/--no-chat",
        "Put a plain prompt through the model's chat template, or never do. Rows with "
        "messages are chats unless told otherwise.",
    ),
]

MaxTokens = Annotated[
    int | None,
    option(
        "Sampling",
        "--max-tokens",
        "N",
        "Most tokens of an answer. Without it the model's generation config says, else 256.",
    ),
]
MinTokens = Annotated[
    int | None, option("Sampling", "--min-tokens", "N", "Fewest tokens of an answer.")
]
Temperature = Annotated[
    float | None,
    option(
        "Sampling",
        "--temperature",
        "X",
        "0 takes the likeliest token. Without it the model's generation config says.",
    ),
]
TopP = Annotated[
    float | None,
    option(
        "Sampling",
        "--top-p",
        "X",
        "Sample from the likeliest tokens whose probabilities add up to X.",
    ),
]
TopK = Annotated[
    int | None,
    option("Sampling", "--top-k", "N", "Sample from the N likeliest tokens; 0: from all."),
]
MinP = Annotated[
    float | None,
    option("Sampling", "--min-p", "X", "Drop tokens less likely than X times the likeliest."),
]
Stop = Annotated[
    list[str] | None,
    option("Sampling", "--stop", "TEXT", "End an answer before this text. May be repeated."),
]
StopTokenIds = Annotated[
    list[int] | None,
    option("Sampling", "--stop-token-id", "ID", "End an answer at this token. May be repeated."),
]
IgnoreEos = Annotated[
    bool | None, flag("Sampling", "--ignore-eos", "Go on after the model's end-of-sequence token.")
]
Seed = Annotated[
    int | None,
    option(
        "Sampling",
        "--seed",
        "N",
        "Seed of the run. With the row's number it fixes the row's sampling.",
    ),
]

Model = Annotated[
    str | None,
    option(
        "Engine",
        "--model -m",
        "MODEL",
        "Hugging Face id (org/name[@revision]), folder, .gguf file, or gemma-3-270m.",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    option(
        "Engine", "--max-num-seqs", "N", "Rows that run at once. Chosen for the device without it."
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    option(
        "Engine",
        "--max-num-batched-tokens",
        "N",
        "Tokens computed in one step, prompts and answers together.",
    ),
]
BlockSize = Annotated[
    int | None, option("Engine", "--block-size", "N", "Token positions in one KV block.")
]
KVCacheMemory = Annotated[
    str | None,
    option(
        "Engine",
        "--kv-cache-memory",
        "SIZE",
        "Memory for keys and values: 4GiB, 512MB or bytes. A share of what is free without it.",
    ),
]
KVCacheDtype = Annotated[
    KVCacheDtypeName | None,
    option(
        "Engine",
        "--kv-cache-dtype",
        choices(KVCacheDtypeName),
        "Type that keys and values are kept in: a smaller one holds more rows, and answers differ "
        "a little. auto is that of the weights.",
    ),
]
GPUMemoryUtilization = Annotated[
    float | None,
    option("Engine", "--gpu-memory-utilization", "X", "Share of the GPU's memory to use."),
]
MaxModelLen = Annotated[
    int | None,
    option(
        "Engine",
        "--max-model-len",
        "N",
        "Longest prompt plus answer in tokens. The model's context without it.",
    ),
]
Dtype = Annotated[
    DtypeName | None, option("Engine", "--dtype", choices(DtypeName), "Type of the weights.")
]
Device = Annotated[str | None, option("Engine", "--device", "auto|cpu|cuda[:N]", "Where to run.")]
AttentionBackend = Annotated[
    AttentionBackendChoice | None,
    option(
        "Engine",
        "--attention-backend",
        choices(AttentionBackendChoice),
        "auto is triton on a GPU and cpu, our compiled kernels, on a CPU; torch runs everywhere.",
    ),
]
Quantization = Annotated[
    QuantizationName | None,
    option(
        "Engine",
        "--quantization",
        choices(QuantizationName),
        "w8a16 rounds weights to 8 bits, on a CPU: faster, and answers differ a little. w8a8 "
        "rounds what they are multiplied by to 8 bits too: faster still where a processor has "
        "AVX512 VNNI.",
    ),
]
Deterministic = Annotated[
    bool | None,
    flag(
        "Engine",
        "--deterministic/--no-deterministic",
        "Give a row's logits the same bits whatever runs beside it. On a CPU that is so unless "
        "turned off, which lets a measurement at the start choose other products; on a GPU it "
        "takes slower kernels with fixed tiles.",
    ),
]
Overlap = Annotated[
    bool | None,
    flag(
        "Engine",
        "--overlap/--no-overlap",
        "Prepare and launch a step while the GPU computes the one before it. Done on a GPU "
        "unless turned off.",
    ),
]
CudaGraphs = Annotated[
    bool | None,
    flag(
        "Engine",
        "--cuda-graphs/--no-cuda-graphs",
        "Record steps in which all rows decode and replay them: on a GPU, and done there unless "
        "turned off or the model does not allow it.",
    ),
]
Scheduler = Annotated[
    SchedulerName | None,
    option(
        "Engine",
        "--scheduler",
        choices(SchedulerName),
        "static admits rows, runs until all of them are done, and admits again: a baseline.",
    ),
]
NoPrefixCaching = Annotated[
    bool, flag("Engine", "--no-prefix-caching", "Compute shared beginnings of prompts anew.")
]
TrustRemoteCode = Annotated[
    bool | None, flag("Engine", "--trust-remote-code", "Run code that comes with the model.")
]
StepTimeout = Annotated[
    float | None,
    option(
        "Engine",
        "--step-timeout",
        "SECONDS",
        "End the run when the device does not finish a step in this time.",
    ),
]

Output = Annotated[
    str | None,
    option(
        "Output",
        "--output -o",
        "OUT",
        "FILE.parquet, or DIR/ for part files. Without it <input name>.results.parquet in "
        "the current folder.",
    ),
]
OutputColumn = Annotated[
    str | None, option("Output", "--output-column", "NAME", "Column of the answers.")
]
RowsPerPart = Annotated[
    int | None, option("Output", "--rows-per-part", "N", "Input rows in one part file.")
]
ReturnTokenIds = Annotated[
    bool | None, flag("Output", "--return-token-ids", "Add a column of token ids.")
]
Overwrite = Annotated[bool | None, flag("Output", "--overwrite", "Replace an output that exists.")]
NoResume = Annotated[
    bool | None,
    flag("Output", "--no-resume", "Run an interrupted job from its first row again."),
]
RetryErrors = Annotated[
    bool | None,
    flag("Output", "--retry-errors", "Run the failed rows of an earlier run again."),
]
OnErrorName = Annotated[
    OnError | None,
    option(
        "Output",
        "--on-error",
        choices(OnError),
        "fail stops at the first failed row. What is done is kept, and the run can be resumed.",
    ),
]
MaxErrors = Annotated[
    str | None,
    option(
        "Output",
        "--max-errors",
        "N|P%",
        "Stop when more rows have failed, in number or as a share of those so far. Without it the "
        "run stops if its first 100 rows all fail.",
    ),
]
ErrorsFile = Annotated[
    str | None,
    option(
        "Output",
        "--errors-file",
        "FILE.jsonl",
        "Write the failed rows there at the end, as lines that can be run again.",
    ),
]
AllowErrors = Annotated[
    bool | None, flag("Output", "--allow-errors", "Exit 0 even though some rows have an error.")
]

Progress = Annotated[
    ProgressName | None,
    option(
        "Terminal",
        "--progress",
        choices(ProgressName),
        "auto draws a bar on a terminal and prints a line every 30 s elsewhere.",
    ),
]
JsonSummary = Annotated[
    bool, flag("Terminal", "--json", "Print the summary as one JSON object on standard output.")
]
ConfigFile = Annotated[
    Path | None,
    option(
        "Terminal",
        "--config",
        "FILE.toml",
        "Read settings from a file. CBATCH_* variables and flags go before it.",
    ),
]
DumpConfig = Annotated[
    bool, flag("Terminal", "--dump-config", "Print the settings as TOML for --config and exit.")
]
DryRun = Annotated[
    bool,
    flag(
        "Terminal",
        "--dry-run",
        "Open the input, choose the columns, print what would run, and exit.",
    ),
]
Quiet = Annotated[bool, flag("Terminal", "--quiet -q", "Print errors only.")]
Verbose = Annotated[
    bool, flag("Terminal", "--verbose -v", "Print warnings of libraries and tracebacks.")
]
