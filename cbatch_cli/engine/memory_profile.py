"""What the largest steps take beside weights and KV cache, found by computing two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import metadata_of_groups
from cbatch_cli.engine.model_runner import Model, memory_errors
from cbatch_cli.errors import DeviceMemoryError, UsageError

PeakMeter = Callable[[Callable[[], None]], int]
"""Does some work and tells how many bytes it took at most."""

_GRAPH_BYTES = 32 << 20
"""What the driver keeps of one recorded step, by a generous guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes beside weights and KV cache, attention workspaces included."""

    largest: int
    """Of a step that uses up the token budget."""
    decoding: int
    """Of one in which every sequence decodes."""


def measure_steps(
    model: Model,
    new_backend: Callable[[], AttentionBackend],
    meter: PeakMeter,
    *,
    num_tokens: int,
    num_seqs: int,
    num_kv_groups: int,
    block_size: int,
    max_model_len: int,
) -> StepMemory:
    """Compute the largest steps, `num_tokens` tokens and `num_seqs` sequences, and meter them.

    `new_backend` binds a backend to the model over a KV cache of a single block, which all
    positions of all sequences share. Raises `UsageError` if a step does not fit into memory.
    """

    def peak(length: int, count: int) -> int:
        def work() -> None:
            dummy_step(
                model,
                new_backend(),
                length=length,
                num_seqs=count,
                num_sampling=num_seqs,
                num_kv_groups=num_kv_groups,
                block_size=block_size,
            )

        return meter(work)

    # Few long sequences: scratch memory of attention grows with the length, if with anything.
    length = min(max_model_len, num_tokens)
    count = min(num_seqs, -(-num_tokens // length))
    try:
        with memory_errors():
            return StepMemory(largest=peak(length, count), decoding=peak(1, num_seqs))
    except DeviceMemoryError as error:
        raise UsageError(
            f"a step of {num_tokens} tokens and {num_seqs} sequences does not fit into memory; "
            f"set max_num_batched_tokens or max_num_seqs lower: {error}"
        ) from error


def dummy_step(
    model: Model,
    backend: AttentionBackend,
    *,
    length: int,
    num_seqs: int,
    num_sampling: int,
    num_kv_groups: int,
    block_size: int,
) -> None:
    """Compute `num_seqs` sequences from their start; `num_sampling` logits are asked for."""
    device = model.device
    num_tokens = length * num_seqs
    positions = torch.arange(length).repeat(num_seqs).to(device)
    backend.begin_step(
        metadata_of_groups(
            query_start_loc=torch.arange(
                0, num_tokens + 1, length, dtype=torch.int32, device=device
            ),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
            block_tables=torch.zeros(
                num_kv_groups, num_seqs, -(-length // block_size), dtype=torch.int32, device=device
            ),
            slot_mapping=(positions % block_size).expand(num_kv_groups, -1),
            num_decodes=num_seqs if length == 1 else 0,
            max_query_len=length,
            max_seq_len=length,
            query_lens_cpu=(length,) * num_seqs,
            seq_lens_cpu=(length,) * num_seqs,
        )
    )
    sample_indices = torch.arange(num_sampling, device=device) % num_tokens
    model.forward(torch.zeros_like(positions), positions, sample_indices)


def kv_pool_bytes(
    *,
    free: int,
    total: int,
    utilization: float,
    steps: StepMemory,
    num_graphs: int,
    logits_bytes: int,
) -> int:
    """What is left for the KV pool of a device with `total` bytes, of which `free` are not in use.

    The share `utilization` of it is used in all. Graphs compute in memory of their own, and write
    their logits, `logits_bytes`, to a tensor that stays.
    """
    for_graphs = 0
    if num_graphs:
        for_graphs = steps.decoding + logits_bytes + num_graphs * _GRAPH_BYTES
    return max(0, int(free - total * (1.0 - utilization)) - steps.largest - for_graphs)
