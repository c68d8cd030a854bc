"""What a benchmark runs: the rows of a job's inputs, or rows that are made up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from cbatch_cli.config import JobConfig
from cbatch_cli.data.job_input import open_job_input
from cbatch_cli.errors import RowError, UsageError
from cbatch_cli.request import Request, RequestKey, SamplingParams
from cbatch_cli.text.prompts import PromptEncoder
from cbatch_cli.text.templates import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 256

# In tokens. The answers follow a Lomax distribution: most are short, a few make up a large share.
_PROMPT_MEDIAN, _PROMPT_SIGMA, _LONGEST_PROMPT = 110, 0.95, 1400
_OUTPUT_SCALE, _OUTPUT_SHAPE, _LONGEST_OUTPUT = 44, 1.5, 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in the order in which they are asked."""

    name: str
    requests: tuple[Request, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def max_output_tokens(self) -> int:
        """Tokens of all answers where none ends early."""
        return sum(request.params.max_tokens for request in self.requests)


def read_workload(
    job: JobConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    defaults: SamplingParams,
    max_model_len: int,
    kv_capacity_tokens: int,
) -> Workload:
    """The rows of a job's inputs, all in memory.

    Raises `UsageError` for what cannot be read and for a row that cannot be run.
    """
    source, prompt = open_job_input(job)
    encoder = PromptEncoder(
        tokenizer=tokenizer,
        prompt=prompt,
        template=None if job.template is None else read_template(job.template),
        system=job.system,
        chat=job.chat,
        defaults=defaults,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
    )
    requests = []
    rows = source.rows(prompt)
    try:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            for row, encoded in zip(batch, encoder.encode(batch), strict=True):
                if isinstance(encoded, RowError):
                    raise UsageError(
                        f"row {row.index} of the workload cannot be run: "
                        f"{encoded.type}: {encoded.message}"
                    )
                requests.append(
                    Request(
                        key=RequestKey(row.index),
                        prompt_token_ids=encoded.token_ids,
                        params=encoded.params,
                    )
                )
    finally:
        encoder.close()
    name = ", ".join(job.inputs)
    if not requests:
        raise UsageError(f"{name}: the workload has no rows")
    return Workload(name=name, requests=tuple(requests))


def make_up_workload(
    num_rows: int, *, seed: int, vocab_size: int, max_sequence_tokens: int
) -> Workload:
    """Random ids, log-normal prompt lengths, heavy-tailed answer lengths; EOS is ignored.

    The same arguments give the same rows. A row takes at most `max_sequence_tokens` (at least 2).
    """
    random = np.random.default_rng(seed)
    longest = max_sequence_tokens // 2
    prompt_lens = random.lognormal(np.log(_PROMPT_MEDIAN), _PROMPT_SIGMA, num_rows)
    prompt_lens = prompt_lens.clip(1, min(_LONGEST_PROMPT, longest)).astype(np.int64)
    output_lens = 1 + _OUTPUT_SCALE * random.pareto(_OUTPUT_SHAPE, num_rows)
    output_lens = output_lens.clip(1, min(_LONGEST_OUTPUT, longest)).astype(np.int64)
    requests = (
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(random.integers(vocab_size, size=prompt_len).tolist()),
            params=SamplingParams(max_tokens=output_len, ignore_eos=True),
        )
        for row, (prompt_len, output_len) in enumerate(
            zip(prompt_lens.tolist(), output_lens.tolist(), strict=True)
        )
    )
    return Workload(name=f"made up, seed {seed}", requests=tuple(requests))
