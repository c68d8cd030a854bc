"""Runs steps on a device beside the CPU: what one step samples is used by the next one there.

A launch has two parts. The first one, on the host, writes the step into memory that no other step
in flight uses. The second is submitted to the device; it reads that memory and what is on the
device, and nothing of the engine's that a later launch may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import metadata_of_groups
from cbatch_cli.engine.cuda_graphs import DecodeGraphs
from cbatch_cli.engine.device import DeviceQueue, GraphCapture, Ticket
from cbatch_cli.engine.device_sampler import DeviceSampler, SamplingPlan
from cbatch_cli.engine.input_buffer import InputBuffer, Packet, pack
from cbatch_cli.engine.model_runner import Model, memory_errors, step_output
from cbatch_cli.engine.sampler import SampledTokens
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.engine.step_layout import (
    StepLayout,
    lay_out,
    new_table_entries,
    packed_token_ids,
)

_FIRST_EXTRA_BYTES = 1 << 16
_TABLE_ALIGNMENT = 16
"""Rows of block tables are multiples of this, since Triton compiles anew for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What the attention backend decides on the host by."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @classmethod
    def of(cls, layout: StepLayout) -> _Shape:
        return cls(
            num_decodes=layout.num_decodes,
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
            query_lens=tuple(layout.query_lens.tolist()),
            seq_lens=tuple(layout.seq_lens.tolist()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedStep:
    """A step as the host has written it."""

    inputs: Packet
    extras: Packet
    """What no graph reads: new blocks, and how to sample."""
    shape: _Shape
    graph_size: int | None
    num_sampling: int
    plan: SamplingPlan | None
    """None where nobody samples."""
    sampled: Tensor
    """int64 `[num_sampling]` on the host, for the ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaunchedStep:
    step: SchedulerOutput
    ticket: Ticket
    sampled: Tensor

    def collect(self, stats: EngineStats) -> StepOutput:
        """Wait for the step. Raises `DeviceMemoryError` where it did not fit into memory."""
        with memory_errors(), stats.phase("wait"):
            stats.device_s += self.ticket.wait()
        token_ids = self.sampled.numpy()
        sampled = SampledTokens(token_ids=token_ids, is_broken=token_ids < 0)
        return step_output(self.step, sampled)


class DeviceModelRunner:
    """Keeps block tables, sampling parameters and last ids by slot on the device.

    With `lag` 1 a step is launched while the one before it runs. A block that a KV group has given
    up stays in its table: a layer reads its window and no more.
    """

    def __init__(
        self,
        *,
        model: Model,
        backend: AttentionBackend,
        sampler: DeviceSampler,
        queue: DeviceQueue,
        num_slots: int,
        num_kv_groups: int,
        max_blocks_per_sequence: int,
        block_size: int,
        max_num_batched_tokens: int,
        lag: int,
    ) -> None:
        self.lag = lag
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._queue = queue
        self._block_size = block_size
        table_shape = (num_kv_groups, num_slots, _aligned(max_blocks_per_sequence))
        self._host_tables = np.zeros(table_shape, dtype=np.int32)
        self._tables = torch.zeros(table_shape, dtype=torch.int32, device=model.device)
        num_turns = lag + 1
        largest = _dummy_inputs(num_slots, num_kv_groups, num_tokens=max_num_batched_tokens)
        self._inputs = InputBuffer(
            pack(largest, 0).num_bytes,
            device=model.device,
            host_bytes=queue.host_bytes,
            num_turns=num_turns,
        )
        self._extras = InputBuffer(
            _FIRST_EXTRA_BYTES,
            device=model.device,
            host_bytes=queue.host_bytes,
            num_turns=num_turns,
            may_grow=True,
        )
        self._sampled = [
            queue.host_bytes(8 * num_slots).view(torch.int64) for _ in range(num_turns)
        ]
        self._last_use: list[Ticket | None] = [None] * num_turns
        self._turn = 0
        self._graphs: DecodeGraphs | None = None
        self._logits: Tensor | None = None

    def launch(self, step: SchedulerOutput, stats: EngineStats) -> _LaunchedStep:
        """Have a step computed, without waiting; times go to `stats` by phase.

        Raises `DeviceMemoryError` when the step does not fit into memory.
        """
        with memory_errors():
            with stats.phase("prepare"):
                prepared = self._prepare(step)
            with stats.phase("launch"):
                try:
                    ticket = self._queue.submit(lambda: self._run(prepared))
                except BaseException:
                    # What was launched of it still reads what the next step will write over.
                    self._queue.submit(_nothing).wait()
                    raise
        self._last_use[self._turn] = ticket
        self._turn = (self._turn + 1) % len(self._last_use)
        return _LaunchedStep(step=step, ticket=ticket, sampled=prepared.sampled)

    def capture_graphs(
        self,
        sizes: Sequence[int],
        capture: GraphCapture,
        *,
        vocab_size: int,
        max_seq_len: int,
    ) -> None:
        """Record decoding steps of so many sequences, none longer than `max_seq_len`.

        Raises whatever keeps them from being recorded; then all steps run as they did.
        """
        num_kv_groups = len(self._host_tables)
        logits = self._tables.new_empty((max(sizes), vocab_size), dtype=torch.float32)
        dummies = {size: _dummy_inputs(size, num_kv_groups) for size in sizes}

        def prepare(size: int) -> None:
            self._inputs.send(self._inputs.fill(dummies[size], 0))

        @torch.inference_mode()
        def decode(size: int) -> None:
            shape = _Shape(
                num_decodes=size,
                max_query_len=1,
                max_seq_len=max_seq_len,
                query_lens=(1,) * size,
                seq_lens=(max_seq_len,) * size,
            )
            inputs = self._inputs.views(pack(dummies[size], 0))
            logits[:size].copy_(self._forward(inputs, shape))

        self._graphs = DecodeGraphs(sizes, prepare=prepare, decode=decode, capture=capture)
        self._logits = logits

    # -- on the host -------------------------------------------------------------------------

    def _prepare(self, step: SchedulerOutput) -> _PreparedStep:
        turn = self._turn
        last_use = self._last_use[turn]
        if last_use is not None:
            last_use.wait()  # it was collected long ago, unless the step was given up
        for scheduled in step.scheduled:
            if scheduled.joined is not None:
                self._sampler.join(
                    scheduled.slot,
                    scheduled.joined.params,
                    row=scheduled.key.row,
                    sample=scheduled.key.sample,
                    num_prompt_tokens=scheduled.joined.num_prompt_tokens,
                )
        places, block_ids = new_table_entries(step, self._host_tables.shape)
        self._host_tables.reshape(-1)[places] = block_ids
        extras: dict[str, NDArray[Any]] = {}
        if len(places):
            extras |= {"table_places": places, "table_block_ids": block_ids}
        layout = lay_out(step.scheduled, self._host_tables, self._block_size)
        num_sampling = int(np.count_nonzero(layout.samples))
        plan = None
        if num_sampling:
            slots, positions = layout.slots[layout.samples], layout.seq_lens[layout.samples]
            plan = self._sampler.plan(slots, positions)
            extras |= plan.arrays
        inputs: dict[str, NDArray[Any]] = {
            "token_ids": packed_token_ids(step.scheduled),
            "positions": layout.positions,
            "slot_mapping": layout.slot_mapping,
            "slots": layout.slots,
            "sample_indices": layout.sample_indices,
            "query_start_loc": layout.query_start_loc,
            "seq_lens": layout.seq_lens.astype(np.int32),
        }
        graph_size = self._graph_size(layout)
        if graph_size is not None:
            inputs = _padded(inputs, graph_size, len(self._host_tables))
        return _PreparedStep(
            inputs=self._inputs.fill(inputs, turn),
            extras=self._extras.fill(extras, turn),
            shape=_Shape.of(layout),
            graph_size=graph_size,
            num_sampling=num_sampling,
            plan=plan,
            sampled=self._sampled[turn][:num_sampling],
        )

    def _graph_size(self, layout: StepLayout) -> int | None:
        """The graph for a step; None for one that has none."""
        if self._graphs is None or layout.max_query_len > 1:
            return None
        return self._graphs.size_for(len(layout.slots))

    # -- on the device -----------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, prepared: _PreparedStep) -> None:
        extras = self._extras.send(prepared.extras)
        if "table_places" in extras:
            self._tables.view(-1).index_copy_(0, extras["table_places"], extras["table_block_ids"])
        inputs = self._inputs.send(prepared.inputs)
        if prepared.graph_size is not None and self._graphs is not None:
            assert self._logits is not None
            self._graphs.replay(prepared.graph_size)
            logits = self._logits[: prepared.num_sampling]
        else:
            logits = self._forward(inputs, prepared.shape)
        if prepared.plan is not None:
            sampled = self._sampler.sample(logits, prepared.plan, extras)
            prepared.sampled.copy_(sampled, non_blocking=True)

    def _forward(self, inputs: dict[str, Tensor], shape: _Shape) -> Tensor:
        """Logits of the sequences that sample."""
        max_blocks = _aligned(-(-shape.max_seq_len // self._block_size))
        block_tables = self._tables[:, :, :max_blocks].index_select(1, inputs["slots"])
        self._backend.begin_step(
            metadata_of_groups(
                query_start_loc=inputs["query_start_loc"],
                seq_lens=inputs["seq_lens"],
                block_tables=block_tables,
                slot_mapping=inputs["slot_mapping"],
                num_decodes=shape.num_decodes,
                max_query_len=shape.max_query_len,
                max_seq_len=shape.max_seq_len,
                query_lens_cpu=shape.query_lens,
                seq_lens_cpu=shape.seq_lens,
            )
        )
        given = inputs["token_ids"]
        last = self._sampler.last_token_ids.index_select(0, given.bitwise_not().clamp_min(0))
        return self._model.forward(
            torch.where(given < 0, last, given), inputs["positions"], inputs["sample_indices"]
        )


def _aligned(num_blocks: int) -> int:
    return -(-num_blocks // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT


def _nothing() -> None:
    """Work that is done when all that was submitted before it is."""


def _dummy_inputs(
    num_seqs: int, num_kv_groups: int, *, num_tokens: int | None = None
) -> dict[str, NDArray[Any]]:
    """Inputs of sequences without length, whose tokens are stored nowhere and read nothing.

    Each has one token; `num_tokens` makes more of them.
    """
    num_tokens = num_tokens or num_seqs
    return {
        "token_ids": np.zeros(num_tokens, dtype=np.int64),
        "positions": np.zeros(num_tokens, dtype=np.int64),
        "slot_mapping": np.full((num_kv_groups, num_tokens), -1, dtype=np.int64),
        "slots": np.zeros(num_seqs, dtype=np.int64),
        "sample_indices": np.arange(num_seqs, dtype=np.int64),
        "query_start_loc": np.arange(num_seqs + 1, dtype=np.int32),
        "seq_lens": np.zeros(num_seqs, dtype=np.int32),
    }


def _padded(
    inputs: dict[str, NDArray[Any]], size: int, num_kv_groups: int
) -> dict[str, NDArray[Any]]:
    """The inputs of decoding sequences, filled up to `size` of them."""
    padded = _dummy_inputs(size, num_kv_groups)
    for name, array in inputs.items():
        padded[name][..., : array.shape[-1]] = array
    return padded
