"""The rows that flow from a source to the sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cbatch_cli.errors import RowError
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import FinishReason

if TYPE_CHECKING:
    import pyarrow as pa


class InputPosition(NamedTuple):
    """A place between two rows: the number of the file, and the byte at which the next starts."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArrowRow:
    """Where the passed-through columns of a Parquet row lie, exact in their Arrow types.

    `num_bytes` is the row's share of the memory that `batch` keeps alive.
    """

    batch: pa.RecordBatch
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One input row. A row that could not be read has an `error` and no columns.

    `columns` holds values as Python reads them. A Parquet row has there only what its prompt is
    made from; `arrow` leads to the rest, since Python values lose some types (nanoseconds).

    `content_hash` is a 128-bit BLAKE2b of the raw line (JSONL, CSV) or of the row's values
    (Parquet), so that a resumed run can tell that a row is the one it has an answer for. `end` is
    where reading can go on behind the row; None where a file has to be read from its start.
    """

    index: int
    columns: dict[str, Any] = field(default_factory=dict)
    error: RowError | None = None
    content_hash: bytes = b""
    source_file: str = ""
    arrow: ArrowRow | None = None
    end: InputPosition | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """What the output holds for one row, beside its own columns.

    `completion` is None exactly when `error` is set. `token_ids` is None unless asked for.
    """

    row_index: int
    completion: str | None
    finish_reason: FinishReason
    error: RowError | None
    metrics: RequestMetrics
    token_ids: tuple[int, ...] | None = None
