"""Telling the format of an input file: by its suffix, else by its first bytes."""

from __future__ import annotations

from cbatch_cli.data.input_files import FORMAT_SUFFIXES, FileFormat, InputFile
from cbatch_cli.data.streams import open_stream
from cbatch_cli.errors import UsageError

PARQUET_MAGIC = b"PAR1"
NUM_FIRST_BYTES = 64 * 1024


def detect_format(file: InputFile) -> FileFormat:
    """The format of `file`. Raises `UsageError` if it cannot be told, or is one JSON array."""
    suffix = file.suffixes[0]
    known = FORMAT_SUFFIXES.get(suffix)
    # Both JSON Lines and single JSON documents are called .json.
    if known is not None and suffix != ".json":
        return known
    with open_stream(file) as (stream, _):
        start = stream.read(NUM_FIRST_BYTES)
    if start.startswith(PARQUET_MAGIC):
        return "parquet"
    lines = [line.strip() for line in start.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    lines = [line for line in lines if line]
    if lines and lines[0].startswith(b"["):
        raise UsageError(
            f"{file.name} is one JSON array, not JSON Lines; `jq -c '.[]'` makes lines of it"
        )
    if known is not None or not lines or any(line.startswith(b"{") for line in lines):
        return "jsonl"
    raise UsageError(f"cannot tell the format of {file.name}; say it with --input-format")
