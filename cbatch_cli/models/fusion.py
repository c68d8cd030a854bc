"""Replaces layers of a model, or parts of them, by fused ones, where numbers show no difference.

The model is run once on a few tokens with its own code, and what every module was given and gave
is kept. A fused layer replaces the original only if it turns the same input into the same output.
Of other layers the parts are fused that can be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_decoder_layer import Workspace
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import LinearMode, TorchLinear, rounds_weights
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor, nn

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.fused_call import OneCallLayer, as_one_call
from cbatch_cli.models.fused_compiled import CompiledOperations
from cbatch_cli.models.fused_decoder import fuse_decoder
from cbatch_cli.models.fused_head import fuse_head
from cbatch_cli.models.fused_layer import FusedLayer, LayerParts, read_parts
from cbatch_cli.models.fused_linear import WeightMerger, release_weights
from cbatch_cli.models.fused_norm import Norm, NotFusable, read_norm
from cbatch_cli.models.fused_operations import (
    DTYPES,
    LayerOperations,
    OperationsName,
    Rotation,
)
from cbatch_cli.models.fused_parts import PartFuser, PartKind, PartReport
from cbatch_cli.models.fused_torch import TorchOperations
from cbatch_cli.models.fused_triton import TritonOperations
from cbatch_cli.models.fusion_probe import (
    ROUNDED_TOLERANCE,
    ModuleRun,
    Probe,
    check_equal,
    check_roundings,
)
from cbatch_cli.models.hf_model import HFModel

LOGGER = logging.getLogger(__name__)

_ROTATIONS: tuple[Rotation, ...] = ("halves", "pairs", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionReport:
    """What `fuse_layers` did to a model."""

    operations: OperationsName
    """What the fused layers and parts are computed by."""
    num_layers: int
    """Decoder layers of the model."""
    num_fused: int
    """Those that are one fused step."""
    is_one_pass: bool
    """Whether a step runs from the embedding to the head without transformers' forward pass."""
    reasons: Mapping[str, int]
    """Why layers were not fused as a whole, and how many for each reason."""
    parts: Mapping[PartKind, PartReport]
    """What became of parts outside of fused layers."""
    linear_kinds: Mapping[str, int]
    """The linear layers that were replaced by what kind, the output head among them."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "operations": self.operations,
            "num_layers": self.num_layers,
            "num_fused": self.num_fused,
            "is_one_pass": self.is_one_pass,
            "reasons": dict(self.reasons),
            "parts": {kind: part.as_dict() for kind, part in self.parts.items()},
            "linear_kinds": dict(self.linear_kinds),
        }


def fuse_layers(
    model: HFModel,
    *,
    mode: LinearMode = "fast",
    kernels: CPUKernels | None = None,
    operations: LayerOperations | None = None,
) -> FusionReport:
    """Replace decoder layers, parts of others and the output head of `model` in place.

    `kernels` are used for float32 on a CPU, and `mode` says which of their linear layers;
    `operations` take the place of those that fit the device. Every weight exists once: with
    `kernels` in its packed form, and then transformers' own code of the layer no longer runs;
    else where it was, or in a merged weight of which the layers' own are views. Check the model
    before, and bind a backend afterwards.
    """
    if operations is None:
        operations = choose_operations(model, mode=mode, kernels=kernels)
    layers = _decoder_layers(model)
    if model.dtype not in DTYPES:
        reason = f"{model.dtype} is not fused".removeprefix("torch.")
        return FusionReport(
            operations=operations.name,
            num_layers=len(layers),
            num_fused=0,
            is_one_pass=False,
            reasons={reason: len(layers)},
            parts={},
            linear_kinds={},
        )
    probe = Probe(model)
    fuser = _LayerFuser(model, probe, operations, mode)
    fused, steps = list[nn.Module](), list[FusedLayer | OneCallLayer]()
    reasons, kinds = Counter[str](), Counter[str]()
    for layer, attention, spec in layers:
        try:
            step = fuser.fuse(layer, attention, spec)
        except NotFusable as error:
            reasons[str(error)] += 1
            continue
        layer.forward = step
        fused.append(layer)
        steps.append(step)
        kinds.update(linear.kind for linear in step.linears)
    parts: dict[PartKind, PartReport] = {}
    # Weights of 8 bits are for models that are fused as a whole.
    if not rounds_weights(mode):
        part_fuser = PartFuser(model.module, probe, operations, fuser.make_linear, fused)
        parts = part_fuser.fuse()
        kinds.update(linear.kind for linear in part_fuser.products)
        fuser.release(part_fuser.replaced_linears)
    if kernels is not None and operations.name == "compiled":
        head = fuse_head(model, probe, mode=mode, kernels=kernels)
        if head is not None:
            kinds[head.kind] += 1
        try:
            model.one_pass = fuse_decoder(model, steps, kernels)
        except NotFusable as error:
            LOGGER.info("the forward pass stays transformers' own: %s", error)
        if head is not None:
            head.release()
    model.unbind()
    return FusionReport(
        operations=operations.name,
        num_layers=len(layers),
        num_fused=len(fused),
        is_one_pass=model.one_pass is not None,
        reasons=reasons,
        parts=parts,
        linear_kinds=kinds,
    )


def choose_operations(
    model: HFModel, *, mode: LinearMode = "fast", kernels: CPUKernels | None = None
) -> LayerOperations:
    """The fastest operations for the model's device and dtype.

    Triton's where the attention is, those of `kernels` for float32 on a CPU, torch's elsewhere.
    """
    if model.attention_backend == "triton":
        return TritonOperations()
    if kernels is not None and model.device.type == "cpu" and model.dtype == torch.float32:
        return CompiledOperations(kernels, mode)
    return TorchOperations()


class _LayerFuser:
    """Makes fused layers of the decoder layers of a model."""

    def __init__(
        self, model: HFModel, probe: Probe, operations: LayerOperations, mode: LinearMode
    ) -> None:
        self._probe = probe
        self._operations = operations
        self._merger = WeightMerger(model.module)
        self._dtype = model.dtype
        self._tolerance = ROUNDED_TOLERANCE if rounds_weights(mode) else None
        self._kernels = operations.kernels if isinstance(operations, CompiledOperations) else None
        self._workspace = Workspace()

    @torch.inference_mode()
    def fuse(
        self, layer: nn.Module, attention: nn.Module, spec: LayerSpec
    ) -> FusedLayer | OneCallLayer:
        """Raises `NotFusable` if the fused layer cannot be built or computes something else."""
        call = self._probe.calls.get(spec.index)
        if call is None or layer not in self._probe.runs:
            raise NotFusable("its attention does not run as part of it")
        parts = read_parts(layer, attention, spec, call, self._read_norm)
        rotation, fused = self._with_own_rotation(layer, parts)
        if not self._operations.keeps_weights:
            fused = FusedLayer(parts, self._operations, self.make_linear, rotation)
            self._compare(layer, parts, fused, self._tolerance)
            self.release(parts.linears)
        if self._kernels is None:
            return fused
        return (
            as_one_call(fused, parts, rotation, kernels=self._kernels, workspace=self._workspace)
            or fused
        )

    def _read_norm(self, module: nn.Module, name: str) -> Norm:
        return read_norm(module, name, self._dtype, self._operations.norm)

    def make_linear(self, linears: Sequence[nn.Linear]) -> Linear:
        """The product of layers on the same input, as the operations compute it."""
        return self._operations.linear(*self._merger.merge(linears))

    def release(self, linears: Sequence[nn.Linear]) -> None:
        """Let go of the weights of replaced layers, if they are not those that are used."""
        if not self._operations.keeps_weights:
            release_weights(linears)

    def _with_own_rotation(
        self, layer: nn.Module, parts: LayerParts
    ) -> tuple[Rotation, FusedLayer]:
        """The fused layer with torch's products, and how it rotates."""

        def make_linear(linears: Sequence[nn.Linear]) -> Linear:
            return TorchLinear(*self._merger.merge(linears))

        errors = []
        for rotation in _ROTATIONS:
            try:
                fused = FusedLayer(parts, self._operations, make_linear, rotation)
                self._compare(layer, parts, fused, None)
            except NotFusable as error:
                errors.append(error)
            except (RuntimeError, ValueError) as error:
                errors.append(NotFusable(f"its fused form fails: {str(error).splitlines()[0]}"))
            else:
                return rotation, fused
        raise errors[0]

    def _compare(
        self, layer: nn.Module, parts: LayerParts, fused: FusedLayer, tolerance: float | None
    ) -> None:
        """Raise `NotFusable` if `fused`, or a part of it, gives another output than `layer` did.

        In half precision a wrong part would not be seen in the sum of all. A `tolerance` is for
        products that are rounded on purpose, and for the whole layer.
        """
        run = self._probe.runs[layer]
        tables = run.kwargs.get("position_embeddings")
        hidden_states = _hidden_states(run)
        if not isinstance(tables, tuple) or not isinstance(run.output, Tensor):
            raise NotFusable("it is not given rotations, or gives more than hidden states")
        if tables[0].dim() != 3 or tables[0].shape[:2] != hidden_states.shape[:2]:
            raise NotFusable("its rotations do not belong to single tokens")
        if tolerance is None:
            attention_run = self._probe.runs[parts.attention]
            rows = _hidden_states(attention_run)
            attended = fused.attention(rows[0], tables[0][0], tables[1][0])[None]
            output = attention_run.output
            expected = output[0] if isinstance(output, tuple) else output
            check_equal(attended, expected, "its attention")
            self._probe.compare_part(parts.mlp.module, fused.mlp, "its mlp")
            total, normed = fused.add_attended(hidden_states[0], expected[0].clone())
            expected_total = self._probe.rows_given_to(parts.pre_mlp_module)
            expected_normed = self._probe.runs[parts.pre_mlp_module].output
            check_roundings(total[None], expected_total, "its sum with the attention's output")
            check_roundings(normed[None], expected_normed, "the norm of that sum")
        actual = fused(hidden_states, **run.kwargs)
        base = hidden_states if tolerance is None else None
        check_equal(actual, run.output, "the fused layer", base=base, tolerance=tolerance)


def _hidden_states(run: ModuleRun) -> Tensor:
    hidden_states = run.args[0] if run.args else run.kwargs.get("hidden_states")
    if not isinstance(hidden_states, Tensor) or hidden_states.dim() != 3:
        raise NotFusable("it is not given hidden states of packed tokens")
    return hidden_states


def _decoder_layers(model: HFModel) -> list[tuple[nn.Module, nn.Module, LayerSpec]]:
    """The module around each attention layer, with that layer."""
    parents = {child: parent for parent in model.module.modules() for child in parent.children()}
    return [
        (parents[attention], attention, spec)
        for attention, spec in zip(model.attention_modules, model.layer_specs, strict=True)
    ]
