"""A device for tests on a CPU: it works late, and records graphs operation by operation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cbatch_kernels import reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import AttentionMetadata, LayerSpec
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.device import DeviceQueue
from cbatch_cli.engine.device_runner import DeviceModelRunner
from cbatch_cli.engine.device_sampler import DeviceSampler, SamplingKernels
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.engine.kv_cache import KVCache
from cbatch_cli.engine.kv_groups import group_layers
from cbatch_cli.engine.noise import philox4x32
from cbatch_cli.engine.scheduler import Scheduler
from cbatch_cli.models.hf_model import HFModel

CPU = torch.device("cpu")


# -- a queue ---------------------------------------------------------------------------------


@dataclass
class LateTicket:
    """Work that is done when somebody waits for it, or for what was submitted after it."""

    queue: LateQueue
    work: Callable[[], None]
    is_done: bool = False
    error: Exception | None = None

    def wait(self) -> float:
        """Do all work up to this; raises what this one has raised, once."""
        while not self.is_done:
            self.queue.do_next()
        error, self.error = self.error, None
        if error is not None:
            raise error
        return 0.25


@dataclass
class LateQueue:
    """Does nothing before it has to.

    What the host writes over too early is seen, as is whatever the work reads that is not its own.
    """

    pending: deque[LateTicket] = field(default_factory=deque)
    most_pending: int = 0

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Memory full of something that no test takes for an id."""
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def submit(self, work: Callable[[], None]) -> LateTicket:
        """Queue the work."""
        ticket = LateTicket(self, work)
        self.pending.append(ticket)
        self.most_pending = max(self.most_pending, len(self.pending))
        return ticket

    def do_next(self) -> None:
        """Do the oldest work."""
        ticket = self.pending.popleft()
        ticket.is_done = True
        try:
            ticket.work()
        except Exception as error:
            ticket.error = error


# -- sampling --------------------------------------------------------------------------------


class PlainSampling:
    """The meaning of the sampling kernels, in plain torch and numpy."""

    def scale_logits(self, logits: Tensor, temperature: Tensor) -> None:
        """Divide by the temperature where there is one."""
        logits.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])

    def filter_thresholds(
        self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, thresholds: Tensor
    ) -> None:
        """By the reference of the kernel."""
        for row, values in enumerate(logits):
            thresholds[row] = reference.filter_threshold(
                values, top_k=int(top_k[row]), top_p=float(top_p[row]), min_p=float(min_p[row])
            )

    def gumbel_argmax(
        self,
        logits: Tensor,
        temperature: Tensor,
        thresholds: Tensor,
        token_ids: Tensor,
        *,
        seeds: Tensor,
        rows: Tensor,
        samples: Tensor,
        positions: Tensor,
    ) -> None:
        """By the noise of the reference."""
        for index, values in enumerate(logits.double()):
            if not math.isfinite(values.max()):
                token_ids[index] = -1
                continue
            if temperature[index] > 0:
                values = values + noise_of(
                    len(values),
                    seed=int(seeds[index]),
                    row=int(rows[index]),
                    sample=int(samples[index]),
                    position=int(positions[index]),
                )
            values[logits[index] < thresholds[index]] = -math.inf
            token_ids[index] = values.argmax()


def noise_of(vocab_size: int, *, seed: int, row: int, sample: int, position: int) -> Tensor:
    """`reference.gumbel_noise`, in one go for the whole vocabulary."""
    low = np.uint64(0xFFFFFFFF)

    def words(*values: int) -> Any:
        return np.array([[value & 0xFFFFFFFF for value in values]], dtype=np.uint64)

    first = philox4x32(words(position, sample, row, row >> 32), words(seed, seed >> 32))[0] & low
    counters = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    constant = np.ones_like(counters)
    counter = np.stack([counters, constant * first[2], constant * first[3], constant * 0], axis=1)
    key = np.stack([constant * first[0], constant * first[1]], axis=1)
    made = philox4x32(counter, key).reshape(-1)[:vocab_size].astype(np.float64)
    uniform = (torch.from_numpy(made) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


# -- graphs ----------------------------------------------------------------------------------


aten = torch.ops.aten
WAITING = {
    aten.item.default,
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
}
"""Operations that wait for a device."""


class RefuseWaiting(TorchDispatchMode):
    """Raises for operations that would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class RecordedGraph(TorchDispatchMode):
    """Every operation of some work, with the tensors that it was given; no Python is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        """Do the operations again; results go where they went."""
        self.num_replays += 1
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@dataclass
class RecordingCapture:
    """Captures by recording operations."""

    graphs: list[RecordedGraph] = field(default_factory=list)
    num_warm_ups: int = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work."""
        assert self.num_warm_ups == len(self.graphs), "a graph is warmed up before it is captured"
        self.num_warm_ups += 1
        work()

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        """Record the work. It is done, too, but only dummies are there."""
        graph = RecordedGraph()
        with graph:
            work()
        self.graphs.append(graph)
        return graph


@dataclass
class RememberedWork:
    """A graph that runs the Python of its work again."""

    work: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        """Do the work."""
        self.num_replays += 1
        self.work()


@dataclass
class RememberingCapture:
    """Captures by remembering the work, for what cannot be recorded by operations."""

    graphs: list[RememberedWork] = field(default_factory=list)

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work."""
        work()

    def capture(self, work: Callable[[], None]) -> RememberedWork:
        """Remember the work."""
        self.graphs.append(RememberedWork(work))
        return self.graphs[-1]


class TensorAttention:
    """Attention for decodes that decides nothing on the host: all shapes are those of its inputs.

    Chunks go to the torch backend. Tokens without a slot are written to an extra block at the end
    of the caches.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        caches: Sequence[tuple[Tensor, Tensor]],
        block_size: int,
    ) -> None:
        self._torch = TorchAttentionBackend(layers, caches, block_size)
        self._caches = {layer.index: cache for layer, cache in zip(layers, caches, strict=True)}
        self._metadata: Sequence[AttentionMetadata] = ()
        self._is_decode = False

    def begin_step(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Take the layout of the next forward pass."""
        self._metadata = metadata
        self._is_decode = metadata[0].max_query_len == 1
        if not self._is_decode:
            self._torch.begin_step(metadata)

    def forward(
        self,
        layer: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store keys and values, then attend."""
        if not self._is_decode:
            return self._torch.forward(
                layer, query, key, value, scale=scale, softcap=softcap, sinks=sinks
            )
        metadata = self._metadata[layer.group]
        tables, seq_lens = metadata.block_tables.long(), metadata.seq_lens.long()
        k_cache, v_cache = (cache.flatten(0, 1) for cache in self._caches[layer.index])
        slots = metadata.slot_mapping
        slots = torch.where(slots < 0, len(k_cache) - 1, slots)
        k_cache.index_copy_(0, slots, key)
        v_cache.index_copy_(0, slots, value)
        keys = self._caches[layer.index][0][tables].flatten(1, 2)
        values = self._caches[layer.index][1][tables].flatten(1, 2)
        group_size = layer.num_heads // layer.num_kv_heads
        keys, values = (x.repeat_interleave(group_size, dim=2) for x in (keys, values))
        scores = torch.einsum("nhd,nkhd->nhk", query, keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        positions = torch.arange(keys.shape[1])
        visible = positions < seq_lens[:, None]
        if layer.sliding_window is not None:
            visible &= positions >= seq_lens[:, None] - layer.sliding_window
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        if sinks is not None:
            extra = sinks.expand(len(scores), -1)[..., None]
            weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        # What lies in blocks that are not seen is anything, NaN too.
        weights = torch.where(visible[:, None], weights, 0.0)
        values = torch.where(visible[:, :, None, None], values, 0.0)
        return torch.einsum("nhk,nkhd->nhd", weights, values)


# -- an engine -------------------------------------------------------------------------------


def device_core(
    model: HFModel,
    *,
    queue: DeviceQueue,
    lag: int = 1,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    prefix_caching: bool = True,
    seed: int = 0,
    kernels: SamplingKernels | None = None,
    new_backend: Callable[..., AttentionBackend] = TensorAttention,
) -> EngineCore:
    """An engine around `model` as it is built for a GPU; its books are checked at every step."""
    groups = group_layers(model.layer_specs)
    cache = KVCache(
        groups, num_blocks=num_blocks + 1, block_size=block_size, dtype=model.dtype, device=CPU
    )
    for tensor in {id(t): t for pair in cache.layers for t in pair}.values():
        tensor.fill_(math.nan)
    backend = new_backend(groups.layers, cache.layers, block_size)
    model.bind(backend, groups.layers)
    scheduler = Scheduler(
        blocks=KVBlocks(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=groups.windows,
            prefix_caching=prefix_caching,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )
    update = scheduler.update

    def checked_update(*args: Any) -> Any:
        ended = update(*args)
        scheduler.check_integrity()
        return ended

    scheduler.update = checked_update  # type: ignore[method-assign]
    runner = DeviceModelRunner(
        model=model,
        backend=backend,
        sampler=DeviceSampler(
            num_slots=max_num_seqs,
            seed=seed,
            eos_token_ids=model.eos_token_ids,
            device=CPU,
            kernels=kernels or PlainSampling(),
        ),
        queue=queue,
        num_slots=max_num_seqs,
        num_kv_groups=len(groups.windows),
        max_blocks_per_sequence=-(-scheduler.max_sequence_tokens // block_size),
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        lag=lag,
    )
    return EngineCore(scheduler=scheduler, runner=runner, vocab_size=model.vocab_size)


def runner_of(core: EngineCore) -> DeviceModelRunner:
    """The runner of a `device_core`."""
    runner = core._runner
    assert isinstance(runner, DeviceModelRunner)
    return runner
