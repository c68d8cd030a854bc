"""The failed rows of an output as JSON lines that can be run again."""

from __future__ import annotations

import base64
import fnmatch
import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cbatch_cli.config import JobConfig
from cbatch_cli.data import durable_io
from cbatch_cli.data.arrow_values import to_python
from cbatch_cli.data.durable_io import DurableFile
from cbatch_cli.data.json_rows import dump_value
from cbatch_cli.data.output_target import STDIN, OutputTarget, shard_path
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import ArrowRow, Row
from cbatch_cli.data.sources import Source, open_files
from cbatch_cli.errors import OutputError, UsageError
from cbatch_cli.shard import Shard

WRITE_BYTES = 2**20
SUFFIX = ".jsonl"


class FailedRows(NamedTuple):
    """How many failed rows were written, and how many could not even be read as rows."""

    path: Path
    num_written: int
    num_unreadable: int

    @property
    def text(self) -> str:
        """One line for people."""
        text = f"{self.num_written:,} failed rows are in {self.path}, to be run again"
        if self.num_unreadable:
            text += f"; {self.num_unreadable:,} more could not be read as rows and cannot be"
        return text


def check_errors_file(
    text: str, *, target: OutputTarget, inputs: Sequence[str], shard: Shard | None = None
) -> Path:
    """The path that `--errors-file` names, or that of a share; its folder is made if need be.

    Raises `UsageError` for a name that a later run would not read as JSON lines, and for a place
    where the file would replace an input or the answers, or be taken for one of them.
    """
    path = Path(text)
    if path.suffix != SUFFIX or path.is_dir():
        raise UsageError(f"--errors-file {text} is no name of a {SUFFIX} file")
    if shard is not None:
        path = shard_path(path, shard, has_suffix=True)
    resolved, output = path.resolve(), target.path.resolve()
    work_dir = target.work_dir.resolve()
    if resolved == output or output in resolved.parents or work_dir in resolved.parents:
        raise UsageError(
            f"--errors-file {text} lies where the answers go; choose another place for it"
        )
    for name in inputs:
        if name != STDIN and _would_read(name, resolved):
            raise UsageError(
                f"--errors-file {text} would be read as part of the input {name}; "
                "choose another place for it"
            )
    durable_io.make_dir(path.parent)
    return path


def write_failed_rows(
    path: Path, config: JobConfig, target: OutputTarget, source: Source, prompt: PromptColumns
) -> FailedRows:
    """Write the rows of `source` that failed in the finished output `target`, all columns of them.

    Raises `OutputError`, and `UsageError` if the input can no longer be read.
    """
    if config.columns != "all":
        source = open_files(
            source.files,
            input_format=config.input_format,
            limit=config.limit,
            max_line_bytes=config.max_line_bytes,
        )
    failed = failed_row_indices(target.files(), with_token_ids=config.return_token_ids)
    return write_errors_file(path, source.rows(prompt), failed)


def failed_row_indices(paths: Sequence[Path], *, with_token_ids: bool) -> Iterator[int]:
    """The indices of the rows with an error, in the order of the files of an output.

    Raises `OutputError` if one cannot be read.
    """
    for path in paths:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                # Ours are the last columns, whatever prefix they have.
                names = file.schema_arrow.names[-6 if with_token_ids else -5 :]
                columns = [names[0], names[3]]
                for batch in file.iter_batches(columns=columns, use_threads=False):
                    failed = batch.filter(batch.column(columns[1]).is_valid())
                    yield from cast("list[int]", failed.column(columns[0]).to_pylist())
        except (OSError, pa.ArrowException) as error:
            raise OutputError(f"cannot read back {path}: {error}") from error


def write_errors_file(path: Path, rows: Iterable[Row], failed: Iterator[int]) -> FailedRows:
    """Write those of `rows` whose indices are in `failed`; both are in order.

    The file appears at once, in place of what had its name. It has no line for a row that could
    not be read. `rows` are not read beyond the last that failed. Raises `OutputError`.
    """
    temporary = path.with_name(f".{path.name}.cbatch.tmp")
    num_written = num_unreadable = 0
    durable_io.unlink(temporary)
    with DurableFile(temporary) as file:
        pending = bytearray()
        for row in _pick(rows, failed):
            if row.error is not None:
                num_unreadable += 1
                continue
            num_written += 1
            pending += _line(row)
            if len(pending) >= WRITE_BYTES:
                file.write(pending)
                pending = bytearray()
        if pending:
            file.write(pending)
        file.fsync()
    durable_io.replace(temporary, path)
    return FailedRows(path, num_written, num_unreadable)


def _pick(rows: Iterable[Row], indices: Iterator[int]) -> Iterator[Row]:
    wanted = next(indices, None)
    if wanted is None:
        return
    for row in rows:
        if row.index == wanted:
            yield row
            wanted = next(indices, None)
            if wanted is None:
                return


def _line(row: Row) -> bytes:
    if row.arrow is None:
        return dump_value(row.columns).encode() + b"\n"
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(_arrow_columns(row.arrow), default=_plain, option=options)


def _arrow_columns(arrow: ArrowRow) -> dict[str, Any]:
    row = arrow.batch.slice(arrow.offset, 1)
    return {name: to_python(row.column(name))[0] for name in row.schema.names}


def _plain(value: Any) -> str:
    """What JSON has no form for; bytes in Base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _would_read(name: str, path: Path) -> bool:
    """Whether the input `name` would read a file at the absolute `path`."""
    source = Path(name).resolve()
    if source == path or (source.is_dir() and source in path.parents):
        return True
    if not glob.has_magic(name):
        return False
    if "**" in name:
        # A `*` of this module crosses slashes, so one stands for any number of folders.
        return fnmatch.fnmatchcase(str(path), str(source).replace("**/", "*"))
    return path.match(str(source))
