"""What one forward pass of a loaded model does: its attention calls, its operations by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.launches import watched_launches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch_cli.attention.backend import AttentionBackend, build_attention_backend
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.devices import on_device
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import NotingBackend, first_step_metadata, layer_caches

# A row of one token, as a decode is, and a chunk.
_QUERY_LENS = (1, 5)
_BLOCK_SIZE = 16

# These make a tensor and compute nothing.
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObservation:
    """One forward pass of a few tokens.

    An operation is a call into torch that is neither a view nor an allocation, a call of one of
    our compiled CPU kernels, or a launch of one of our Triton kernels.
    """

    softcaps: tuple[float | None, ...]
    """By attention layer: what the scores are bounded by."""
    has_sinks: tuple[bool, ...]
    operations: tuple[Mapping[str, int], ...]
    """By decoder layer: how often each operation was called."""
    attention_operations: tuple[int, ...]
    """By decoder layer: how many of these are of the attention backend, which may need more of
    them for more rows."""
    operations_outside: Mapping[str, int]
    """Those of the embedding, the positions, the last norm, the head."""

    @property
    def operations_per_layer(self) -> tuple[int, ...]:
        """By decoder layer: the number of operations."""
        return tuple(sum(names.values()) for names in self.operations)


class CountedKernels:
    """In place of `CPUKernels`: each call is told to `on_call` while there is one."""

    def __init__(self, kernels: CPUKernels) -> None:
        self.variant, self.panel = kernels.variant, kernels.panel
        self.on_call: Callable[[str], None] | None = None
        for name, function in vars(kernels).items():
            if name not in ("variant", "panel"):
                setattr(self, name, self._counted(name, function))

    def _counted(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            if self.on_call is not None:
                self.on_call(f"cbatch::{name}")
            function(*args)

        return counted


class _CountedBackend(NotingBackend):
    """Has `counter` tell its operations apart."""

    def __init__(self, backend: AttentionBackend, counter: _Counter) -> None:
        super().__init__(backend)
        self._counter = counter

    def forward(self, layer: LayerSpec, *states: Tensor, **options: Any) -> Tensor:
        """As the backend does."""
        with self._counter.in_attention():
            return super().forward(layer, *states, **options)


@torch.inference_mode()
def observe_step(model: HFModel, kernels: CountedKernels | None) -> StepObservation:
    """Run one step over a small KV cache of its own; bind another backend afterwards.

    `kernels` are those that the fused layers of `model` were built with, if any were.
    """
    counter = _Counter()
    backend = _CountedBackend(_step_backend(model, kernels), counter)
    positions = _positions(model)
    token_ids = (positions + 1) % model.vocab_size
    last_indices = torch.tensor(_QUERY_LENS, device=model.device).cumsum(0) - 1
    model.bind(backend)
    if kernels is not None:
        kernels.on_call = counter.count
    try:
        backend.begin_step([first_step_metadata(_QUERY_LENS, _BLOCK_SIZE, model.device)])
        watched = counter.by_layer(decoder_layers(model))
        with on_device(model.device), _launches(model, counter), watched, counter:
            model.forward(token_ids, positions, last_indices)
    finally:
        if kernels is not None:
            kernels.on_call = None
        model.unbind()
    calls = [backend.calls[spec.index] for spec in model.layer_specs]
    return StepObservation(
        softcaps=tuple(call.softcap for call in calls),
        has_sinks=tuple(call.sinks is not None for call in calls),
        operations=tuple(counter.layers),
        attention_operations=tuple(counter.attention),
        operations_outside=counter.outside,
    )


def decoder_layers(model: HFModel) -> list[nn.Module]:
    """The blocks that the model's attention layers are in, in the order of those, each once."""
    parents = {child: parent for parent in model.module.modules() for child in parent.children()}
    layers = []
    for attention in model.attention_modules:
        layer = parents[attention]
        while not isinstance(parents.get(layer, layer), nn.ModuleList) and layer in parents:
            layer = parents[layer]
        layers.append(layer if layer in parents else parents[attention])
    return list(dict.fromkeys(layers))


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, by the decoder layer that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Counter[str]] = []
        self.attention: list[int] = []
        self.outside: Counter[str] = Counter()
        self._layer: int | None = None
        self._is_in_attention = self._is_in_launch = False

    def count(self, name: str) -> None:
        """One call of the operation `name`."""
        if self._is_in_launch:
            return
        if self._layer is None:
            self.outside[name] += 1
            return
        self.layers[self._layer][name] += 1
        self.attention[self._layer] += self._is_in_attention

    @contextmanager
    def by_layer(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Count what runs inside each of `layers` apart."""

        def enter(index: int | None) -> Callable[..., None]:
            return lambda *_: setattr(self, "_layer", index)

        handles = []
        for index, layer in enumerate(layers):
            self.layers.append(Counter())
            self.attention.append(0)
            handles.append(layer.register_forward_pre_hook(enter(index)))
            handles.append(layer.register_forward_hook(enter(None)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def in_attention(self) -> Iterator[None]:
        """What is counted meanwhile is of the attention backend."""
        self._is_in_attention = True
        try:
            yield
        finally:
            self._is_in_attention = False

    @contextmanager
    def launch(self, name: str) -> Iterator[None]:
        """One launch of the Triton kernel `name`; what its interpreter does is not counted."""
        self.count(f"cbatch::{name}")
        self._is_in_launch = True
        try:
            yield
        finally:
            self._is_in_launch = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # An operation that is made of others arrives here first, since no gradients are kept.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if _computes(func, args, result):
            self.count(func.overloadpacket._qualified_op_name)
        return result


def _computes(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a call did more than look at what was there, or make room for what comes."""
    if func.overloadpacket.__name__ in _ALLOCATIONS:
        return False
    if func._schema.is_mutable:
        return True
    results = [value for value in _flat(result) if isinstance(value, Tensor)]
    given = {value.untyped_storage().data_ptr() for value in _flat(args) if _has_storage(value)}
    return any(
        not _has_storage(value) or value.untyped_storage().data_ptr() not in given
        for value in results
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _has_storage(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _launches(model: HFModel, counter: _Counter) -> AbstractContextManager[None]:
    """Count launches of Triton kernels, where a model uses them."""
    if model.attention_backend != "triton":
        return nullcontext()
    launches: AbstractContextManager[None] = watched_launches(counter.launch)
    return launches


def _positions(model: HFModel) -> Tensor:
    return torch.cat([torch.arange(length, device=model.device) for length in _QUERY_LENS])


def _step_backend(model: HFModel, kernels: CountedKernels | None) -> AttentionBackend:
    caches = layer_caches(model, num_blocks=len(_QUERY_LENS), block_size=_BLOCK_SIZE, value=0.0)
    if model.attention_backend == "cpu" and kernels is not None:
        return CPUAttentionBackend(model.layer_specs, caches, _BLOCK_SIZE, kernels)
    return build_attention_backend(
        model.attention_backend,
        model.layer_specs,
        caches,
        _BLOCK_SIZE,
        max_num_seqs=len(_QUERY_LENS),
        max_model_len=_BLOCK_SIZE,
    )
