"""Turns a scheduled step into tensors, runs the model once, and samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from cbatch_kernels.cpu_head import LargestLogits
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import metadata_of_groups
from cbatch_cli.engine.sampler import SampledTokens, Sampler
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.engine.step_layout import (
    StepLayout,
    lay_out,
    new_table_entries,
    packed_token_ids,
)
from cbatch_cli.errors import DeviceMemoryError


class Model(Protocol):
    """A causal language model over packed tokens, attention given by a bound backend."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def forward(self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """Logits float32 `[N, vocab]` at `sample_indices` `[N]` of the pack `[num_tokens]`."""
        ...

    def forward_largest(
        self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor
    ) -> Tensor | LargestLogits:
        """As `forward`, or each row's largest logit alone."""
        ...


class TorchModelRunner:
    """Keeps block tables and sampling parameters by slot in preallocated buffers.

    A block that a KV group has given up stays in its table: a layer reads its window and no more.
    """

    def __init__(
        self,
        *,
        model: Model,
        backend: AttentionBackend,
        sampler: Sampler,
        num_slots: int,
        num_kv_groups: int,
        max_blocks_per_sequence: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._block_size = block_size
        self._block_tables = np.zeros(
            (num_kv_groups, num_slots, max_blocks_per_sequence), dtype=np.int32
        )

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        """Compute one step; times go to `stats` by phase.

        Raises `DeviceMemoryError` when the step does not fit into memory.
        """
        with memory_errors():
            with stats.phase("prepare"):
                self._join_and_extend(step)
                layout = lay_out(step.scheduled, self._block_tables, self._block_size)
                self._begin_step(layout)
                token_ids = packed_token_ids(step.scheduled)
                slots, positions = layout.slots[layout.samples], layout.seq_lens[layout.samples]
            with stats.phase("forward"):
                takes_largest = self._sampler.takes_largest(slots, positions)
                forward = self._model.forward_largest if takes_largest else self._model.forward
                logits = forward(
                    self._to_device(token_ids),
                    self._to_device(layout.positions),
                    self._to_device(layout.sample_indices),
                )
            with stats.phase("sample"):
                if not len(slots):
                    return StepOutput(step_id=step.step_id, token_ids={})
                return step_output(step, self._sampler.sample(logits, slots, positions))

    def _join_and_extend(self, step: SchedulerOutput) -> None:
        for scheduled in step.scheduled:
            if scheduled.joined is not None:
                self._sampler.join(
                    scheduled.slot,
                    scheduled.joined.params,
                    row=scheduled.key.row,
                    sample=scheduled.key.sample,
                    num_prompt_tokens=scheduled.joined.num_prompt_tokens,
                )
        places, block_ids = new_table_entries(step, self._block_tables.shape)
        self._block_tables.reshape(-1)[places] = block_ids

    def _begin_step(self, layout: StepLayout) -> None:
        """Hand the layout to the attention backend."""
        max_blocks = -(-layout.max_seq_len // self._block_size)
        # One copy to the device for all groups.
        block_tables = self._to_device(self._block_tables[:, layout.slots, :max_blocks])
        slots_by_group = self._to_device(layout.slot_mapping)
        self._backend.begin_step(
            metadata_of_groups(
                query_start_loc=self._to_device(layout.query_start_loc),
                seq_lens=self._to_device(layout.seq_lens.astype(np.int32)),
                block_tables=block_tables,
                slot_mapping=slots_by_group,
                num_decodes=layout.num_decodes,
                max_query_len=layout.max_query_len,
                max_seq_len=layout.max_seq_len,
                query_lens_cpu=tuple(layout.query_lens.tolist()),
                seq_lens_cpu=tuple(layout.seq_lens.tolist()),
            )
        )

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        # Indexing along the second axis of an array leaves the first one innermost.
        array = np.ascontiguousarray(array)
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)


def step_output(step: SchedulerOutput, sampled: SampledTokens) -> StepOutput:
    """What a step sampled, by sequence."""
    token_ids = {}
    failed = {}
    sampling = [scheduled.key for scheduled in step.scheduled if scheduled.samples]
    ids, broken = sampled.token_ids.tolist(), sampled.is_broken.tolist()
    for key, token_id, is_broken in zip(sampling, ids, broken, strict=True):
        if is_broken:
            failed[key] = "the model's logits are not finite"
        else:
            token_ids[key] = (token_id,)
    return StepOutput(step_id=step.step_id, token_ids=token_ids, failed=failed)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Name what torch raises when memory is short."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceMemoryError(str(error) or "out of memory") from error
    except RuntimeError as error:
        # The CPU allocator has no exception type of its own.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise DeviceMemoryError(str(error)) from error
