"""Fuses what can be of layers that cannot be fused as a whole: norms, gated MLPs, products.

A part is recognised by what it is made of, whatever it is called, and its `forward` is replaced
only if the fused one gives what the part gave in the probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor, nn

from cbatch_cli.models.fused_layer import FusedMLP, read_mlp
from cbatch_cli.models.fused_linear import MakeLinear, SharedProduct, are_mergeable
from cbatch_cli.models.fused_norm import NotFusable, looks_like_norm, read_norm
from cbatch_cli.models.fused_operations import LayerOperations
from cbatch_cli.models.fusion_probe import Probe, check_equal

PartKind = Literal["norms", "mlps", "projections"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """What became of the parts of one kind."""

    num_found: int
    num_fused: int
    reasons: Mapping[str, int]
    """Why parts were left alone, and how many for each reason."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_found": self.num_found,
            "num_fused": self.num_fused,
            "reasons": dict(self.reasons),
        }


class PartFuser:
    """Replaces parts of `model` that run in a step and lie in none of the modules `done`.

    Projections are layers on the same input: queries, keys and values, for instance.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        operations: LayerOperations,
        make_linear: MakeLinear,
        done: Collection[nn.Module],
    ) -> None:
        self._probe = probe
        self._operations = operations
        self._make_linear = make_linear
        inside = {module for part in done for module in part.modules()}
        self._modules = {
            module: name.rpartition(".")[2]
            for name, module in model.named_modules()
            if module not in inside and module in probe.runs
        }
        self._own_forwards: dict[nn.Module, Any] = {}
        self.replaced_linears: list[nn.Linear] = []
        """Layers of the model whose weights are no longer used, but by `products`."""
        self.products: list[Linear] = []

    @torch.inference_mode()
    def fuse(self) -> dict[PartKind, PartReport]:
        """Replace what can be; a report for each kind of which there is one."""
        found, reasons = Counter[PartKind](), dict[PartKind, Counter[str]]()
        for kind, fuse, part in self._attempts():
            found[kind] += 1
            try:
                fuse(part)
            except NotFusable as error:
                reasons.setdefault(kind, Counter())[str(error)] += 1
        if self._own_forwards:
            try:
                self._probe.check_logits()
            except NotFusable as error:
                self._undo()
                reasons = {kind: Counter({str(error): number}) for kind, number in found.items()}
        return {
            kind: PartReport(
                num_found=number,
                num_fused=number - reasons.get(kind, Counter()).total(),
                reasons=dict(reasons.get(kind, {})),
            )
            for kind, number in found.items()
        }

    def _attempts(self) -> Iterator[tuple[PartKind, Callable[[Any], None], Any]]:
        """Kind, what fuses it, and the part, MLPs before the linear layers that are left."""
        for module in self._modules:
            if isinstance(getattr(module, "down_proj", None), nn.Module):
                yield "mlps", self._fuse_mlp, module
            elif looks_like_norm(module):
                yield "norms", self._fuse_norm, module
        for module in self._modules:
            for linears in self._on_the_same_input(module):
                yield "projections", self._fuse_projections, linears

    def _fuse_mlp(self, module: nn.Module) -> None:
        self._probe.rows_given_to(module)
        parts = read_mlp(module)
        mlp = FusedMLP(parts, self._operations, self._make_linear)
        self._probe.compare_part(module, mlp)
        self._replace(module, mlp)
        self.replaced_linears += [*parts.gate_up, parts.down]
        self.products += mlp.linears

    def _fuse_norm(self, module: nn.Module) -> None:
        rows = self._probe.rows_given_to(module)
        norm = read_norm(module, self._modules[module], rows.dtype, self._operations.norm)
        step = self._operations.norm(norm)
        self._probe.compare_part(module, step)
        self._replace(module, step)

    def _fuse_projections(self, linears: list[nn.Linear]) -> None:
        rows = self._probe.rows_given_to(linears[0])
        if any(not torch.equal(rows, self._probe.rows_given_to(linear)) for linear in linears):
            raise NotFusable("their input changes between them")
        if not are_mergeable(linears):
            raise NotFusable("they differ in dtype")
        product = self._make_linear(linears)
        shared = SharedProduct(product, [linear.out_features for linear in linears])
        forwards = [shared.part(index) for index in range(len(linears))]
        for linear, forward in zip(linears, forwards, strict=True):
            check_equal(forward(rows), self._probe.runs[linear].output, "their product")
        for linear, forward in zip(linears, forwards, strict=True):
            self._replace(linear, forward)
        self.replaced_linears += linears
        self.products.append(product)

    def _on_the_same_input(self, module: nn.Module) -> Iterator[list[nn.Linear]]:
        """Linear layers of `module` that the probe gave the same tensor, where there are more."""
        if module in self._own_forwards:
            return
        groups: dict[int, list[nn.Linear]] = {}
        for child in module.children():
            if type(child) is nn.Linear and child in self._modules:
                groups.setdefault(id(self._probe.runs[child].given), []).append(child)
        yield from (linears for linears in groups.values() if len(linears) > 1)

    def _replace(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._own_forwards[module] = vars(module).get("forward")
        module.forward = forward

    def _undo(self) -> None:
        for module, forward in self._own_forwards.items():
            del module.forward
            if forward is not None:
                module.forward = forward
        self._own_forwards.clear()
        self.replaced_linears.clear()
        self.products.clear()
