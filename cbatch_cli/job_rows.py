"""Which rows of the input are to be run, and what earlier runs have settled of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cbatch_cli.data.journal_replay import Replay
from cbatch_cli.data.part_info import PartInfo, RowsHash
from cbatch_cli.data.prompt_columns import PromptColumns
from cbatch_cli.data.row import Row, RowResult
from cbatch_cli.data.sources import Source
from cbatch_cli.errors import ResumeMismatchError
from cbatch_cli.request import Request, RequestKey, SamplingParams
from cbatch_cli.resume import RunPlan


@dataclass(frozen=True, slots=True)
class RowToRun:
    """A row for the engine, and the output ids that an interrupted run had made of it."""

    row: Row
    resumed_token_ids: tuple[int, ...] = ()
    attempt: int = 1

    def request(self, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> Request:
        """What the engine is asked: to go on where an interrupted run had come to."""
        resumed = self.resumed_token_ids
        if len(resumed) >= params.max_tokens:
            resumed = ()
        return Request(
            key=RequestKey(self.row.index),
            prompt_token_ids=prompt_token_ids,
            params=params,
            resumed_token_ids=resumed,
            attempt=self.attempt,
        )


class JobRows:
    """Reads the input once, and checks that rows which were settled are what they were.

    `num_read` counts the rows so far, those skipped and those of other shards among them.
    """

    def __init__(
        self,
        *,
        source: Source,
        prompt: PromptColumns,
        plan: RunPlan,
        journal: Replay,
        rows_per_part: int,
        output: str,
    ) -> None:
        self._source = source
        self._prompt = prompt
        self._plan = plan
        self._journal = journal
        self._rows_per_part = rows_per_part
        self._output = output
        self._hashes: dict[int, RowsHash] = {}
        """Of the parts left alone that are being read."""
        self.num_read = plan.num_skipped

    def to_run(self, settle: Callable[[Row, RowResult], None]) -> Iterator[RowToRun]:
        """The rows to run, in order; those with a result are handed to `settle`.

        Raises `ResumeMismatchError` at a row that has changed since its result was made.
        """
        rows = self._source.rows(
            self._prompt, num_skipped=self._plan.num_skipped, start=self._plan.start
        )
        for row in rows:
            self.num_read += 1
            number = row.index // self._rows_per_part
            if not self._plan.shard.owns(number):
                continue
            part = self._plan.parts.get(number)
            if part is not None:
                self._check_part(number, part, row)
                continue
            result = self._settled(row)
            if result is not None:
                settle(row, result)
                continue
            partial = self._journal.partials.get(row.index)
            if partial is None:
                yield RowToRun(row)
            else:
                self._require_same(row, partial.content_hash)
                yield RowToRun(row, partial.token_ids, partial.attempt + 1)
        for part in self._plan.parts.values():
            if part.rows.stop > self.num_read:
                self._refuse(f"the number of rows, now {self.num_read},")

    def num_own(self, num_input_rows: int) -> int:
        """How many rows are the job's where the input has so many."""
        return self._plan.shard.num_rows(num_input_rows, self._rows_per_part)

    def _settled(self, row: Row) -> RowResult | None:
        """The result of a row that is not to be run again."""
        journaled = self._journal.result(row.index)
        if journaled is not None:
            self._require_same(row, journaled.content_hash)
            result: RowResult | None = journaled.result
        else:
            result = self._plan.reopened_result(row.index)
        is_tried_again = self._plan.retry_errors and result is not None and result.error is not None
        return None if is_tried_again else result

    def _check_part(self, number: int, part: PartInfo, row: Row) -> None:
        if row.index not in part.rows:
            self._refuse(f"the number of rows, once {part.rows.stop},")
        rows_hash = self._hashes.setdefault(number, RowsHash())
        rows_hash.add(row.content_hash)
        if rows_hash.num_rows == len(part.rows):
            del self._hashes[number]
            if rows_hash.hexdigest() != part.rows_hash:
                self._refuse(f"rows {part.rows.start} to {part.rows.stop - 1}")

    def _require_same(self, row: Row, content_hash: bytes) -> None:
        if row.content_hash != content_hash:
            self._refuse(f"row {row.index}")

    def _refuse(self, what: str) -> None:
        raise ResumeMismatchError(
            f"{what} of the input changed since {self._output} was begun; run it as it was to "
            "resume, start over with --overwrite, or choose another output with -o"
        )
