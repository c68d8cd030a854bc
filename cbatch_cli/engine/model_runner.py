"""Turns a scheduled step into tensors, runs the model once, and samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata
from cbatch_cli.engine.sampler import Sampler
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from cbatch_cli.errors import DeviceMemoryError


class Model(Protocol):
    """A causal language model over packed tokens, attention given by a bound backend."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        sample_indices: Tensor,
        *,
        only_largest: bool = False,
    ) -> Tensor:
        """Logits float32 `[N, vocab]` at `sample_indices` `[N]` of the pack `[num_tokens]`.

        With `only_largest` a logit that is not its row's largest may be -inf.
        """
        ...


class _Pack(NamedTuple):
    """The packed tokens of a step, on the device, and who samples, on the host."""

    token_ids: Tensor
    position_ids: Tensor
    sample_indices: Tensor
    """Of each sequence that samples: its last token's place in the pack."""
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Of each sequence that samples: the place in it that the sampled token takes."""


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
        self._last_token_ids = np.zeros(num_slots, dtype=np.int64)

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        """Compute one step; times go to `stats` by phase.

        Raises `DeviceMemoryError` when the step does not fit into memory.
        """
        with _memory_errors():
            with stats.phase("prepare"):
                self._join_and_extend(step)
                pack = self._pack(step)
            with stats.phase("forward"):
                logits = self._model.forward(
                    pack.token_ids,
                    pack.position_ids,
                    pack.sample_indices,
                    only_largest=self._sampler.takes_largest(pack.slots, pack.positions),
                )
            with stats.phase("sample"):
                return self._sample(step, pack, logits)

    def _join_and_extend(self, step: SchedulerOutput) -> None:
        for scheduled in step.scheduled:
            slot = scheduled.slot
            if scheduled.joined is not None:
                self._sampler.join(
                    slot,
                    scheduled.joined.params,
                    row=scheduled.key.row,
                    sample=scheduled.key.sample,
                    num_prompt_tokens=scheduled.joined.num_prompt_tokens,
                )
            for table, new in zip(self._block_tables, scheduled.new_blocks, strict=True):
                if new.block_ids:
                    table[slot, new.first : new.first + len(new.block_ids)] = new.block_ids

    def _pack(self, step: SchedulerOutput) -> _Pack:
        """Tensors of the packed tokens; hands the layout to the attention backend."""
        scheduled = step.scheduled
        num_seqs = len(scheduled)
        slots = np.fromiter((s.slot for s in scheduled), np.int64, num_seqs)
        starts = np.fromiter((s.start for s in scheduled), np.int64, num_seqs)
        query_lens = np.fromiter((s.num_tokens for s in scheduled), np.int64, num_seqs)
        query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        seq_lens = starts + query_lens

        owner = np.repeat(np.arange(num_seqs), query_lens)
        positions = np.arange(len(owner)) - (query_start_loc[:-1] - starts)[owner]
        block_index, offset = np.divmod(positions, self._block_size)
        slot_mapping = self._block_tables[:, slots[owner], block_index].astype(np.int64)
        slot_mapping = slot_mapping * self._block_size + offset

        max_seq_len = int(seq_lens.max())
        max_blocks = -(-max_seq_len // self._block_size)
        # One copy to the device for all groups.
        block_tables = self._to_device(self._block_tables[:, slots, :max_blocks])
        slots_by_group = self._to_device(slot_mapping)
        first_group = AttentionMetadata(
            query_start_loc=self._to_device(query_start_loc),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=block_tables[0],
            slot_mapping=slots_by_group[0],
            num_decodes=int(np.count_nonzero(query_lens == 1)),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
            query_lens_cpu=tuple(query_lens.tolist()),
            seq_lens_cpu=tuple(seq_lens.tolist()),
        )
        others = [
            dataclasses.replace(first_group, block_tables=tables, slot_mapping=group_slots)
            for tables, group_slots in zip(block_tables[1:], slots_by_group[1:], strict=True)
        ]
        self._backend.begin_step([first_group, *others])
        samples = np.fromiter((s.samples for s in scheduled), np.bool_, num_seqs)
        sample_indices = query_start_loc[1:][samples].astype(np.int64) - 1
        return _Pack(
            token_ids=self._to_device(self._token_ids(scheduled, len(owner))),
            position_ids=self._to_device(positions),
            sample_indices=self._to_device(sample_indices),
            slots=slots[samples],
            positions=seq_lens[samples],
        )

    def _token_ids(
        self, scheduled: tuple[ScheduledSequence, ...], num_tokens: int
    ) -> NDArray[np.int64]:
        """Packed ids; an id that the scheduler did not know yet is the slot's last sampled one."""
        token_ids = np.empty(num_tokens, dtype=np.int64)
        end = 0
        for sequence in scheduled:
            start, end = end, end + sequence.num_tokens
            num_known = len(sequence.token_ids)
            token_ids[start : start + num_known] = sequence.token_ids
            if num_known < sequence.num_tokens:
                token_ids[end - 1] = self._last_token_ids[sequence.slot]
        return token_ids

    def _sample(self, step: SchedulerOutput, pack: _Pack, logits: Tensor) -> StepOutput:
        sampling = [s for s in step.scheduled if s.samples]
        if not sampling:
            return StepOutput(step_id=step.step_id, token_ids={})
        sampled = self._sampler.sample(logits, pack.slots, pack.positions)
        self._last_token_ids[pack.slots] = sampled.token_ids
        token_ids = {
            s.key: (token_id,)
            for s, token_id, is_broken in zip(
                sampling, sampled.token_ids.tolist(), sampled.is_broken, strict=True
            )
            if not is_broken
        }
        failed = {
            s.key: "the model's logits are not finite"
            for s, is_broken in zip(sampling, sampled.is_broken, strict=True)
            if is_broken
        }
        return StepOutput(step_id=step.step_id, token_ids=token_ids, failed=failed)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        # Indexing along the second axis of an array leaves the first one innermost.
        array = np.ascontiguousarray(array)
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)


@contextmanager
def _memory_errors() -> Iterator[None]:
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
