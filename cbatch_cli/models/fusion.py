"""Replaces decoder layers of a model on a CPU by fused ones, where numbers show no difference.

The model is run once on a few tokens with its own code, and every layer's input and output are
kept. A fused layer replaces the original only if it turns the same input into the same output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_library import CPUKernels, load_kernels
from cbatch_kernels.cpu_linear import LinearMode, TorchLinear, choose_linear
from torch import Tensor, nn

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.fused_head import (
    ROUNDED_TOLERANCE,
    TOLERANCE,
    fuse_head,
    relative_error,
)
from cbatch_cli.models.fused_layer import (
    FusedLayer,
    LayerParts,
    NotFusable,
    read_parts,
)
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import NotingBackend, first_step_metadata, layer_caches

_PROBE_LENGTHS = (9, 4)
_PROBE_FIRST_POSITION = 60
"""Rotations of early positions are close to none; attention does not look at positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionReport:
    """What `fuse_layers` did to a model."""

    num_layers: int
    """Decoder layers of the model."""
    num_fused: int
    reasons: Mapping[str, int]
    """Why layers were left alone, and how many for each reason."""
    linear_kinds: Mapping[str, int]
    """The linear layers in use by kind, the output head among them."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_layers": self.num_layers,
            "num_fused": self.num_fused,
            "reasons": dict(self.reasons),
            "linear_kinds": dict(self.linear_kinds),
        }


def fuse_layers(
    model: HFModel,
    *,
    mode: LinearMode = "fast",
    kernels: CPUKernels | None = None,
) -> FusionReport:
    """Replace the decoder layers and the output head of `model` in place, where that is exact.

    The weights of replaced layers exist once, in their packed form: transformers' own code of
    these layers no longer runs, so check the model before. Bind a backend afterwards. Does
    nothing to models that are not float32 on a CPU. Raises `KernelsUnavailable` without the
    compiled kernels.
    """
    kernels = kernels or load_kernels()
    attention_modules = model.attention_modules
    if model.device.type != "cpu" or model.dtype != torch.float32:
        reason = f"{model.dtype} on {model.device} is not fused".removeprefix("torch.")
        num_layers = len(attention_modules)
        return FusionReport(
            num_layers=num_layers, num_fused=0, reasons={reason: num_layers}, linear_kinds={}
        )
    probe = _Probe(model)
    num_fused, reasons, kinds = 0, Counter[str](), Counter[str]()
    layers = _decoder_layers(model)
    for layer, attention, spec in layers:
        try:
            fused = _fused_layer(probe, layer, attention, spec, mode=mode, kernels=kernels)
        except NotFusable as error:
            reasons[str(error)] += 1
            continue
        layer.forward = fused
        num_fused += 1
        kinds.update(linear.kind for linear in fused.linears)
    head = fuse_head(model, mode=mode, kernels=kernels, largest_logits=probe.largest_logits)
    if head is not None:
        kinds[head] += 1
    model.unbind()
    return FusionReport(
        num_layers=len(layers), num_fused=num_fused, reasons=reasons, linear_kinds=kinds
    )


@torch.inference_mode()
def _fused_layer(
    probe: _Probe,
    layer: nn.Module,
    attention: nn.Module,
    spec: LayerSpec,
    *,
    mode: LinearMode,
    kernels: CPUKernels,
) -> FusedLayer:
    """Raises `NotFusable` if the fused layer cannot be built or computes something else."""
    call = probe.calls.get(spec.index)
    if call is None or layer not in probe.runs:
        raise NotFusable("its attention does not run as part of it")
    parts = read_parts(layer, attention, spec, call)
    probe.compare(layer, FusedLayer(parts, kernels, TorchLinear), tolerance=TOLERANCE)

    def make_linear(weight: Tensor, bias: Tensor | None) -> Any:
        return choose_linear(weight, bias, mode=mode, kernels=kernels)

    fused = FusedLayer(parts, kernels, make_linear)
    tolerance = ROUNDED_TOLERANCE if mode == "w8a16" else TOLERANCE
    probe.compare(layer, fused, tolerance=tolerance)
    _release_weights(parts)
    return fused


def _release_weights(parts: LayerParts) -> None:
    for linear in (*parts.qkv, *parts.output, *parts.gate_up, *parts.down):
        linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)


def _decoder_layers(model: HFModel) -> list[tuple[nn.Module, nn.Module, LayerSpec]]:
    """The module around each attention layer, with that layer."""
    parents = {child: parent for parent in model.module.modules() for child in parent.children()}
    return [
        (parents[attention], attention, spec)
        for attention, spec in zip(model.attention_modules, model.layer_specs, strict=True)
    ]


class _Probe:
    """One run of a model's own code, and what its decoder layers were given and gave."""

    def __init__(self, model: HFModel) -> None:
        self.runs: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self._model = model
        block_size = max(_PROBE_LENGTHS)
        caches = layer_caches(
            model, num_blocks=len(_PROBE_LENGTHS), block_size=block_size, value=0.0
        )
        backend = NotingBackend(TorchAttentionBackend(model.layer_specs, caches, block_size))
        backend.begin_step([first_step_metadata(_PROBE_LENGTHS, block_size, model.device)])
        self.calls = backend.calls
        model.bind(backend)
        handles = [
            layer.register_forward_hook(self._note, with_kwargs=True)
            for layer, _, _ in _decoder_layers(model)
        ]
        try:
            self._logits = self._forward(only_largest=False)
        finally:
            for handle in handles:
                handle.remove()

    def largest_logits(self) -> tuple[Tensor, Tensor]:
        """Logits `[N, vocab]` of the model as it was, and as it is if asked for the largest."""
        return self._logits, self._forward(only_largest=True)

    def _forward(self, *, only_largest: bool) -> Tensor:
        num_tokens = sum(_PROBE_LENGTHS)
        generator = torch.Generator().manual_seed(0)
        positions = torch.arange(num_tokens) * 7 + _PROBE_FIRST_POSITION
        return self._model.forward(
            torch.randint(self._model.vocab_size, (num_tokens,), generator=generator),
            positions % self._model.max_model_len,
            torch.arange(num_tokens - _PROBE_LENGTHS[-1], num_tokens),
            only_largest=only_largest,
        )

    def compare(self, layer: nn.Module, fused: FusedLayer, *, tolerance: float) -> None:
        """Raise `NotFusable` if `fused` gives another output than `layer` did."""
        args, kwargs, expected = self.runs[layer]
        tables = kwargs.get("position_embeddings")
        if not isinstance(tables, tuple) or not isinstance(expected, Tensor):
            raise NotFusable("it is not given rotations, or gives more than hidden states")
        cosines, hidden_states = tables[0], args[0] if args else kwargs.pop("hidden_states")
        if cosines.dim() != 3 or cosines.shape[:2] != hidden_states.shape[:2]:
            raise NotFusable("its rotations do not belong to single tokens")
        error = relative_error(fused(hidden_states, **kwargs), expected)
        # Not a number is no small difference.
        if not error <= tolerance:
            raise NotFusable(f"the fused layer differs by {error:.1g} of its output")

    def _note(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        def kept(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) else value

        self.runs[layer] = (tuple(map(kept, args)), dict(kwargs), kept(output))
