"""Whether a loaded model, run in packed and mixed chunks, still computes what it should.

The judge is the model's own attention code in transformers, run on whole rows one at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cbatch_cli.attention.backend import (
    AttentionBackend,
    AttentionBackendName,
    build_attention_backend,
)
from cbatch_cli.errors import ModelError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import layer_caches, starts_of, step_metadata

# Small, so that short rows cross block boundaries; 16 is the smallest that Triton kernels take.
_BLOCK_SIZES: dict[AttentionBackendName, int] = {"torch": 4, "cpu": 4, "triton": 16}

# How many new tokens of each of two rows a step computes: a chunk, a decode beside a chunk, a chunk
# beside a decode. Few steps, since each one reads all weights.
_SCHEDULE = ((7, 0), (1, 6), (9, 1))

# How many of a row's new tokens are compared in each step, counted from the last.
_NUM_COMPARED = 2

# The first row is made longer than the shortest window, but not longer than this: a row of a
# thousand tokens takes seconds on a CPU, and how far a token sees has been read from the model's
# own mask already.
_LONGEST_WINDOW = 128

# Largest root mean square of the difference at a position, as a share of the logits' spread.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}


def self_check(model: HFModel, backend_name: AttentionBackendName = "torch") -> None:
    """Raise `ModelError` if packed, chunked logits differ from the model's own, one-shot ones.

    Binds an attention backend of that name to the model: bind another one afterwards.
    """
    schedule = _schedule(model)
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(model.vocab_size, (sum(lengths),), generator=generator)
        for lengths in zip(*schedule, strict=True)
    ]
    errors = []
    for row, compared in zip(
        rows, _packed_logits(model, rows, schedule, backend_name), strict=True
    ):
        expected = model.eager_logits(row.to(model.device), torch.tensor(list(compared)))
        errors.append(_relative_errors(torch.stack(list(compared.values())), expected))
    error = _judged_error(torch.cat(errors), model.dtype)
    tolerance = _TOLERANCES[model.dtype]
    # Not a number is no small difference.
    if not error <= tolerance:
        raise ModelError(
            f"models of type {model.model_type} cannot be run: their logits for packed tokens "
            f"differ from those of their own attention by {error:.2g} of the logits' spread, "
            f"where rounding explains {tolerance:.2g}"
        )


def _schedule(model: HFModel) -> list[list[int]]:
    """New tokens of each row in each step."""
    schedule = [list(lengths) for lengths in _SCHEDULE]
    windows = [spec.sliding_window for spec in model.layer_specs if spec.sliding_window]
    shortest = min(windows, default=0)
    if shortest <= _LONGEST_WINDOW:
        schedule[-1][0] = max(schedule[-1][0], shortest)
    # Beyond what the model may be given, rotations may be shared by the rows of a step.
    computed = sum(lengths[0] for lengths in schedule[:-1])
    schedule[-1][0] = max(1, min(schedule[-1][0], model.max_model_len - computed))
    return schedule


def _packed_logits(
    model: HFModel,
    rows: list[Tensor],
    schedule: list[list[int]],
    backend_name: AttentionBackendName,
) -> list[dict[int, Tensor]]:
    """Logits `[vocab]` of each row by position, computed as the schedule says."""
    block_size = _BLOCK_SIZES[backend_name]
    num_blocks = [math.ceil(len(row) / block_size) for row in rows]
    # The blocks of a row lie apart and out of order, and what was not written is not a number.
    pool = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)).int()
    tables = torch.zeros(len(rows), max(num_blocks), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(pool, num_blocks)):
        tables[row, : len(blocks)] = blocks
    backend = _poisoned_backend(model, rows, len(pool), backend_name)
    model.bind(backend)

    logits: list[dict[int, Tensor]] = [{} for _ in rows]
    computed = [0] * len(rows)
    for new_tokens in schedule:
        parts = [
            (row, torch.arange(computed[row], computed[row] + new_tokens[row]))
            for row in sorted(range(len(rows)), key=new_tokens.__getitem__)  # decodes first
            if new_tokens[row]
        ]
        backend.begin_step([step_metadata(parts, tables, block_size, model.device)])
        starts = starts_of([len(positions) for _, positions in parts])
        compared = [
            (row, int(position), start + index)
            for (row, positions), start in zip(parts, starts, strict=False)
            for index, position in enumerate(positions)
            if len(positions) - index <= _NUM_COMPARED
        ]
        packed = model.forward(
            torch.cat([rows[row][positions] for row, positions in parts]).to(model.device),
            torch.cat([positions for _, positions in parts]).to(model.device),
            torch.tensor([index for _, _, index in compared], device=model.device),
        )
        for (row, position, _), values in zip(compared, packed, strict=True):
            logits[row][position] = values
        computed = [done + new for done, new in zip(computed, new_tokens, strict=True)]
    return logits


def _poisoned_backend(
    model: HFModel, rows: list[Tensor], num_blocks: int, name: AttentionBackendName
) -> AttentionBackend:
    block_size = _BLOCK_SIZES[name]
    return build_attention_backend(
        name,
        model.layer_specs,
        layer_caches(model, num_blocks=num_blocks, block_size=block_size, value=math.nan),
        block_size,
        max_num_seqs=len(rows),
        max_model_len=max(map(len, rows)),
    )


def _relative_errors(logits: Tensor, expected: Tensor) -> Tensor:
    """The difference at each position, relative to how far that position's logits spread."""
    difference = (logits - expected).square().mean(dim=-1).sqrt()
    return difference / expected.std(dim=-1)


def _judged_error(errors: Tensor, dtype: torch.dtype) -> float:
    """The largest error, or in half precision the median.

    There, rounding sends some token of a mixture of experts to other experts.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    return (errors.median() if is_half else errors.max()).item()
