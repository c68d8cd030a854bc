from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.engine.kv_cache import KVCache
from cbatch_cli.engine.kv_groups import group_layers
from cbatch_cli.engine.memory_profile import StepMemory, kv_pool_bytes, measure_steps
from cbatch_cli.errors import UsageError
from cbatch_cli.models.hf_model import HFModel
from tests.tiny_models import VOCAB_SIZE, tiny_model


class Watched:
    """A model that notes the shapes of its steps."""

    def __init__(self, model: HFModel) -> None:
        self.model = model
        self.device = model.device
        self.steps: list[tuple[int, int, tuple[int, ...]]] = []
        self.num_decodes: list[int] = []
        self.memory: float = 1e9

    def forward(self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        assert int(position_ids.max()) < self.model.max_model_len
        if len(token_ids) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        logits = self.model.forward(token_ids, position_ids, sample_indices)
        self.steps.append((len(token_ids), int(position_ids.max()) + 1, tuple(logits.shape)))
        return logits


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "largest"),
    [
        (100, 8, (100, 100, (8, VOCAB_SIZE))),
        (300, 8, (384, 128, (8, VOCAB_SIZE))),
        (300, 2, (256, 128, (2, VOCAB_SIZE))),
        (4, 4, (4, 4, (4, VOCAB_SIZE))),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_largest_steps_are_computed(
    name: str, num_tokens: int, num_seqs: int, largest: tuple[int, int, tuple[int, ...]]
) -> None:
    watched, steps, built = measure(name, num_tokens=num_tokens, num_seqs=num_seqs)
    assert watched.steps == [largest, (num_seqs, 1, (num_seqs, VOCAB_SIZE))]
    assert watched.num_decodes == [0, num_seqs], "each is computed by the kernels that will"
    # A fake meter: the n-th measurement is n million bytes.
    assert steps == StepMemory(largest=1_000_000, decoding=2_000_000)
    assert built == [1, 1], "the cache of one measurement is gone before the next"


def measure(
    name: str, *, num_tokens: int, num_seqs: int, memory: float = 1e9
) -> tuple[Watched, StepMemory, list[int]]:
    model = HFModel(
        tiny_model(name), max_model_len=128, eos_token_ids=frozenset(), generation_defaults={}
    )
    groups = group_layers(model.layer_specs)
    watched = Watched(model)
    watched.memory = memory
    built: list[int] = []
    num_measured = 0

    def new_backend() -> AttentionBackend:
        cache = KVCache(groups, num_blocks=1, block_size=16, dtype=model.dtype, device=model.device)
        for tensors in cache.layers:
            for tensor in tensors:
                tensor.zero_()
        built[-1] += 1
        backend = TorchAttentionBackend(groups.layers, cache.layers, 16)
        model.bind(backend, groups.layers)
        begin_step = backend.begin_step

        def watched_begin(metadata: Sequence[AttentionMetadata]) -> None:
            watched.num_decodes.append(metadata[0].num_decodes)
            begin_step(metadata)

        backend.begin_step = watched_begin  # type: ignore[method-assign]
        return backend

    def meter(work: Callable[[], None]) -> int:
        nonlocal num_measured
        built.append(0)
        work()
        num_measured += 1
        return num_measured * 1_000_000

    steps = measure_steps(
        watched,
        new_backend,
        meter,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_kv_groups=len(groups.windows),
        block_size=16,
        max_model_len=128,
    )
    return watched, steps, built


def test_a_step_that_does_not_fit_names_what_to_set_lower() -> None:
    with pytest.raises(UsageError, match="100 tokens and 8 sequences .* max_num_batched_tokens"):
        measure("llama", num_tokens=100, num_seqs=8, memory=64)


def test_what_is_left_for_the_pool() -> None:
    steps = StepMemory(largest=10 << 20, decoding=3 << 20)

    def pool(num_graphs: int, free: int = 900 << 20) -> int:
        return kv_pool_bytes(
            free=free,
            total=1000 << 20,
            utilization=0.75,
            steps=steps,
            num_graphs=num_graphs,
            logits_bytes=5 << 20,
        )

    assert pool(0) == (900 - 250 - 10) << 20
    assert pool(4) == (900 - 250 - 10 - 3 - 5 - 4 * 32) << 20
    assert pool(4, free=300 << 20) == 0
