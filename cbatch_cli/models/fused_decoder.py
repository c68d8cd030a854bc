"""A whole forward pass on a CPU: embedding, rotations, fused layers, last norm and head.

transformers' own pass around fused layers takes longer than some of its products: it builds masks,
wraps outputs and asks the config at every step. It is left out only where it was watched to do
nothing but hand each module's output on to the next, and where logits show no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_decoder import Decoder
from cbatch_kernels.cpu_library import CPUKernels
from torch import Tensor, nn

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.fused_call import OneCallLayer
from cbatch_cli.models.fused_layer import FusedLayer
from cbatch_cli.models.fused_norm import NotFusable
from cbatch_cli.models.fusion_probe import TOLERANCE, relative_error
from cbatch_cli.models.hf_model import Forward, HFModel
from cbatch_cli.models.packed_step import first_step_metadata, layer_caches

_LENGTHS = (1, 6, 4)
"""A row of one token, as a decode is, and chunks."""

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a module, with the very objects that it was given and gave."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class FusedDecoder:
    """The modules of a model around its fused layers, and what they are given."""

    def __init__(
        self,
        *,
        embedding: nn.Module,
        rotations: Sequence[Callable[[Tensor, Tensor], Tables]],
        layers: Sequence[OneCallLayer],
        rotation_of_layer: Sequence[int],
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        self._embedding, self._rotations = embedding, tuple(rotations)
        self._layers, self._rotation_of_layer = tuple(layers), tuple(rotation_of_layer)
        self._norm, self._head = norm, head

    def bound_to(self, backend: AttentionBackend, layers: Sequence[LayerSpec]) -> Forward | None:
        """The pass over `backend`; None where that is not our own for CPUs."""
        if not isinstance(backend, CPUAttentionBackend):
            return None
        calls = [
            layer.in_decoder(tables=tables)
            for layer, tables in zip(self._layers, self._rotation_of_layer, strict=True)
        ]
        rows = {spec.index: row for row, spec in enumerate(layers)}
        if [rows[layer.layer_index] for layer in self._layers] != list(range(len(layers))):
            return None
        decoder = Decoder(calls, backend.words)

        def forward(token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
            positions = position_ids[None]
            embedded = self._embedding(token_ids[None])
            tables = [rotate(embedded, positions) for rotate in self._rotations]
            pairs = [(cos[0], sin[0]) for cos, sin in tables]
            # A norm looks at one row at a time: only those that sample are normed.
            rows = decoder(embedded[0], pairs, sample_indices)
            logits: Tensor = self._head(self._norm(rows[None]))
            return logits[0]

        return forward


@torch.inference_mode()
def fuse_decoder(
    model: HFModel, layers: Sequence[FusedLayer | OneCallLayer], kernels: CPUKernels
) -> FusedDecoder:
    """The whole pass of a model whose `layers` are fused and whose head is in place.

    Leaves a backend bound to the model. Raises `NotFusable` where transformers' own pass does more
    than hand on what modules give, or gives other logits.
    """
    one_calls = [layer for layer in layers if isinstance(layer, OneCallLayer)]
    if len(one_calls) < len(model.layer_specs):
        raise NotFusable("not every layer is one call")
    block_size = max(_LENGTHS)
    caches = layer_caches(model, num_blocks=len(_LENGTHS), block_size=block_size, value=0.0)
    backend = CPUAttentionBackend(model.layer_specs, caches, block_size, kernels)
    backend.begin_step([first_step_metadata(_LENGTHS, block_size, model.device)])
    model.bind(backend)
    step = _step(model, seed=0)
    decoder = _read(model, one_calls, step, _watched(model, step))
    forward = decoder.bound_to(backend, model.layer_specs)
    assert forward is not None
    # Of another step too: nothing may hang on the first.
    for other in (step, _step(model, seed=1)):
        expected = model.forward(*other)
        try:
            error = relative_error(forward(*other), expected)
        except (RuntimeError, ValueError, TypeError) as failure:
            raise NotFusable(f"its modules fail: {str(failure).splitlines()[0]}") from None
        # Not a number is no small difference.
        if not error <= TOLERANCE:
            raise NotFusable(f"the logits differ by {error:.1g}")
    return decoder


def _step(model: HFModel, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions from the whole range, and the tokens that sample, not all of them."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(_LENGTHS)
    return (
        torch.randint(model.vocab_size, (num_tokens,), generator=generator),
        torch.randint(model.max_model_len, (num_tokens,), generator=generator),
        torch.randperm(num_tokens, generator=generator)[: num_tokens // 2],
    )


def _watched(model: HFModel, step: tuple[Tensor, Tensor, Tensor]) -> list[_Call]:
    """The calls of modules in one pass, in the order in which they ended."""
    calls: list[_Call] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(_Call(module, args, kwargs, output))

    handles = [
        module.register_forward_hook(note, with_kwargs=True) for module in model.module.modules()
    ]
    try:
        model.forward(*step)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _read(
    model: HFModel,
    layers: Sequence[OneCallLayer],
    step: tuple[Tensor, Tensor, Tensor],
    calls: Sequence[_Call],
) -> FusedDecoder:
    """What the pass was seen to be made of. Raises `NotFusable` if it is anything else."""
    token_ids, position_ids, sample_indices = step
    embedded = _only_call(calls, model.embedding, "embedding")
    if not _is_same(embedded.args, token_ids[None]) or embedded.kwargs:
        raise NotFusable("its embedding is given more than the tokens")
    layer_calls = [call for call in calls if getattr(call.module, "forward", None) in layers]
    if [call.module.forward for call in layer_calls] != list(layers):
        raise NotFusable("its layers run in another order")
    rotations: list[_Call] = []
    rotation_of_layer, hidden_states = [], embedded.output
    for call in layer_calls:
        if not call.args or call.args[0] is not hidden_states:
            raise NotFusable("hidden states change between its embedding and its layers")
        hidden_states = call.output
        rotation = _giver(calls, call.kwargs.get("position_embeddings"))
        if rotation not in rotations:
            rotations.append(rotation)
        rotation_of_layer.append(rotations.index(rotation))
    norm = next((call for call in calls if call.args and call.args[0] is hidden_states), None)
    head = _only_call(calls, model.head, "head")
    if norm is None or len(norm.args) != 1 or norm.kwargs or not isinstance(norm.output, Tensor):
        raise NotFusable("its last layer is followed by more than a norm")
    if not _is_same(head.args, norm.output[:, sample_indices]) or head.kwargs:
        raise NotFusable("its head is given more than the last norm's rows")
    if getattr(calls[-1].output, "logits", None) is not head.output:
        raise NotFusable("its head is followed by more")
    return FusedDecoder(
        embedding=embedded.module,
        rotations=[_again(call, embedded.output, position_ids[None]) for call in rotations],
        layers=layers,
        rotation_of_layer=rotation_of_layer,
        norm=norm.module,
        head=head.module,
    )


def _only_call(calls: Sequence[_Call], module: nn.Module | None, what: str) -> _Call:
    found = [call for call in calls if call.module is module]
    if len(found) != 1:
        raise NotFusable(f"its {what} does not run once")
    return found[0]


def _giver(calls: Sequence[_Call], tables: Any) -> _Call:
    """The call that gave a layer its rotations."""
    if isinstance(tables, tuple) and len(tables) == 2:
        for call in calls:
            output = call.output
            is_pair = isinstance(output, tuple) and len(output) == 2
            if is_pair and output[0] is tables[0] and output[1] is tables[1]:
                return call
    raise NotFusable("its rotations are not what one module gives")


def _again(call: _Call, embedded: Tensor, positions: Tensor) -> Callable[[Tensor, Tensor], Tables]:
    """The same call of a rotation for other tokens, given as embedded and by their positions."""
    module = call.module

    def place_of(value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if value is embedded:
            return 0
        if value.dtype == positions.dtype and torch.equal(value, positions):
            return 1
        raise NotFusable("its rotations hang on more than positions")

    args = [(place_of(value), value) for value in call.args]
    kwargs = {name: (place_of(value), value) for name, value in call.kwargs.items()}

    def rotate(embedded: Tensor, positions: Tensor) -> Tables:
        given = (embedded, positions)
        tables: Tables = module(
            *(value if place is None else given[place] for place, value in args),
            **{
                name: value if place is None else given[place]
                for name, (place, value) in kwargs.items()
            },
        )
        return tables

    return rotate


def _is_same(args: tuple[Any, ...], expected: Tensor) -> bool:
    return len(args) == 1 and isinstance(args[0], Tensor) and torch.equal(args[0], expected)
