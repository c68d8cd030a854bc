"""A decoder layer as a few fused operations, in place of transformers' own code.

What a layer is made of is read from the names and shapes of its parts, as Llama, Qwen, Mistral,
Phi and Gemma name them; that the reading is right has to be shown by numbers, see fusion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_layers import Activation
from cbatch_kernels.cpu_packed import Linear
from torch import Tensor, nn

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.attention_hook import binding_of
from cbatch_cli.models.fused_linear import MakeLinear, are_mergeable
from cbatch_cli.models.fused_norm import Norm, NotFusable
from cbatch_cli.models.fused_operations import HeadNorms, LayerOperations, Rotation
from cbatch_cli.models.packed_step import AttentionCall

_LLAMA_NORMS = {"input_layernorm", "post_attention_layernorm"}
_GEMMA_NORMS = {*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPParts:
    """A gated MLP; gate and up are two layers, or one with gate first."""

    module: nn.Module
    activation: Activation
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """What one decoder layer is made of."""

    attention: nn.Module
    spec: LayerSpec
    call: AttentionCall
    input_norm: Norm
    head_norms: HeadNorms | None
    post_attention_norm: Norm | None
    pre_mlp_norm: Norm
    pre_mlp_module: nn.Module
    """Of which that is the norm."""
    post_mlp_norm: Norm | None
    qkv: tuple[nn.Linear, ...]
    output: nn.Linear
    mlp: MLPParts

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """All linear layers."""
        return (*self.qkv, self.output, *self.mlp.gate_up, self.mlp.down)


def read_parts(
    layer: nn.Module,
    attention: nn.Module,
    spec: LayerSpec,
    call: AttentionCall,
    read_norm: Callable[[nn.Module, str], Norm],
) -> LayerParts:
    """The parts of a decoder layer; `read_norm` tells what a module of a name is.

    Raises `NotFusable`.
    """
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        raise NotFusable("it has no part named mlp")
    names = {name for name, _ in layer.named_children() if name.endswith("layernorm")}
    if names not in (_LLAMA_NORMS, _GEMMA_NORMS):
        raise NotFusable(f"its norms are {', '.join(sorted(names)) or 'none'}")
    children = {name for name, _ in layer.named_children()} - names
    if any(
        next(getattr(layer, name).parameters(), None) is not None
        for name in children
        if getattr(layer, name) is not mlp and getattr(layer, name) is not attention
    ):
        raise NotFusable(f"it has parts beside attention and mlp: {', '.join(sorted(children))}")
    norms = {name: read_norm(getattr(layer, name), name) for name in names}
    is_gemma = names == _GEMMA_NORMS
    post_attention = norms["post_attention_layernorm"]
    pre_mlp_name = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    return LayerParts(
        attention=attention,
        spec=spec,
        call=call,
        input_norm=norms["input_layernorm"],
        head_norms=_head_norms(attention, spec, read_norm),
        post_attention_norm=post_attention if is_gemma else None,
        pre_mlp_norm=norms[pre_mlp_name],
        pre_mlp_module=getattr(layer, pre_mlp_name),
        post_mlp_norm=norms["post_feedforward_layernorm"] if is_gemma else None,
        mlp=read_mlp(mlp),
        qkv=_linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        output=_linears(attention, ("o_proj",), "dense")[0],
    )


def read_mlp(mlp: nn.Module) -> MLPParts:
    """The parts of a gated MLP. Raises `NotFusable`."""
    return MLPParts(
        module=mlp,
        activation=_activation(mlp),
        gate_up=_linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        down=_linears(mlp, ("down_proj",), "down_proj")[0],
    )


class FusedMLP:
    """Stands in for the `forward` of a gated MLP."""

    def __init__(
        self, parts: MLPParts, operations: LayerOperations, make_linear: MakeLinear
    ) -> None:
        self._gate_up = make_linear(parts.gate_up)
        self._activate = operations.activation(parts.activation)
        self._down = make_linear([parts.down])

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The two products."""
        return (self._gate_up, self._down)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` to the same."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self._down(self._activate(self._gate_up(rows)))
        return output.view(hidden_states.shape)


class FusedAttention:
    """The part of a fused layer from normed rows to attended ones, on packed tokens."""

    def __init__(
        self,
        parts: LayerParts,
        operations: LayerOperations,
        make_linear: MakeLinear,
        rotation: Rotation,
    ) -> None:
        self._module, self._call = parts.attention, parts.call
        self._qkv = make_linear(parts.qkv)
        self._heads = operations.heads(parts.spec, norms=parts.head_norms, rotation=rotation)
        self._output = make_linear([parts.output])

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The two products."""
        return (self._qkv, self._output)

    def __call__(self, rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Normed rows `[T, C]` and rotations `[T, 2R]` to what is added to the residual."""
        backend, spec = binding_of(self._module)
        qkv = self._qkv(rows)
        heads = self._heads(qkv, cosines, sines)
        values = qkv[:, (spec.num_heads + spec.num_kv_heads) * spec.head_dim :]
        attended = backend.forward(
            spec,
            heads[:, : spec.num_heads],
            heads[:, spec.num_heads :],
            values.unflatten(1, (spec.num_kv_heads, spec.value_head_dim)),
            scale=self._call.scale,
            softcap=self._call.softcap,
            sinks=self._call.sinks,
        )
        output: Tensor = self._output(attended.flatten(1))
        return output


class FusedLayer:
    """Stands in for the `forward` of a decoder layer on packed tokens `[1, T, C]`."""

    def __init__(
        self,
        parts: LayerParts,
        operations: LayerOperations,
        make_linear: MakeLinear,
        rotation: Rotation = "halves",
    ) -> None:
        self._norm_input = operations.norm(parts.input_norm)
        self.attention = FusedAttention(parts, operations, make_linear, rotation)
        self.add_attended = operations.add(
            added_norm=parts.post_attention_norm, norm=parts.pre_mlp_norm, owns_residual=False
        )
        self.mlp = FusedMLP(parts.mlp, operations, make_linear)
        self._add_last = operations.add(
            added_norm=parts.post_mlp_norm, norm=None, owns_residual=True
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four products of the layer."""
        return (*self.attention.linears, *self.mlp.linears)

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **__: Any,
    ) -> Tensor:
        """`[1, T, C]` to the same; positions are in the two tables `[1, T, 2R]` of rotations."""
        cosines, sines = position_embeddings
        rows = hidden_states[0]
        attended = self.attention(self._norm_input(rows), cosines[0], sines[0])
        residual, normed = self.add_attended(rows, attended)
        return self._add_last(residual, self.mlp(normed))[0].unsqueeze(0)


def _linears(parent: nn.Module, names: Sequence[str], merged: str) -> tuple[nn.Linear, ...]:
    found = [getattr(parent, name, None) for name in names]
    if None in found:
        found = [getattr(parent, merged, None)]
    linears = tuple(module for module in found if type(module) is nn.Linear)
    if len(linears) != len(found) or not are_mergeable(linears):
        raise NotFusable(f"{'/'.join(names)} are no plain linear layers")
    return linears


def _head_norms(
    attention: nn.Module, spec: LayerSpec, read_norm: Callable[[nn.Module, str], Norm]
) -> HeadNorms | None:
    names = [name for name in ("q_norm", "k_norm") if getattr(attention, name, None) is not None]
    if not names:
        return None
    norms = [read_norm(getattr(attention, name), name) for name in names]
    if any(norm.weight.shape[0] != spec.head_dim for norm in norms):
        raise NotFusable("its norms of queries and keys do not norm heads apart")
    kinds = {(norm.epsilon, norm.offset, norm.rounds_before_weight) for norm in norms}
    if len(norms) != 2 or len(kinds) != 1:
        raise NotFusable("its norms of queries and keys are not alike")
    return norms[0], norms[1]


def _activation(mlp: nn.Module) -> Activation:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if function is None:
        raise NotFusable("its mlp has no activation beside a gate, as where it mixes experts")
    values = torch.linspace(-6.0, 6.0, 97)
    candidates: dict[Activation, Tensor] = {
        "silu": torch.nn.functional.silu(values),
        "gelu_tanh": torch.nn.functional.gelu(values, approximate="tanh"),
    }
    for name, expected in candidates.items():
        if torch.allclose(function(values), expected, atol=1e-6):
            return name
    raise NotFusable("its activation is neither silu nor gelu in its tanh form")
