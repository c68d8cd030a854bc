"""A decoder layer as a few calls of compiled kernels, in place of transformers' own code.

What a layer is made of is read from the names and shapes of its parts, as Llama, Qwen, Mistral,
Phi and Gemma name them; that the reading is right has to be shown by numbers, see fusion.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels import cpu_layers
from cbatch_kernels.cpu_layers import Activation
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_linear import Linear
from torch import Tensor, nn

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.models.attention_hook import binding_of
from cbatch_cli.models.packed_step import AttentionCall

Norm = tuple[Tensor, float]
"""Weight and epsilon of an RMSNorm; the weight is what the normed values are multiplied by."""

_LLAMA_NORMS = {"input_layernorm", "post_attention_layernorm"}
_GEMMA_NORMS = {*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"}


class NotFusable(Exception):
    """A layer is not built as one of the kinds known here; the message says in what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """The weights of one decoder layer, projections that share their input merged."""

    attention: nn.Module
    spec: LayerSpec
    call: AttentionCall
    input_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    post_attention_norm: Norm | None
    pre_mlp_norm: Norm
    post_mlp_norm: Norm | None
    activation: Activation
    qkv: tuple[nn.Linear, ...]
    output: tuple[nn.Linear, ...]
    gate_up: tuple[nn.Linear, ...]
    down: tuple[nn.Linear, ...]


def read_parts(
    layer: nn.Module, attention: nn.Module, spec: LayerSpec, call: AttentionCall
) -> LayerParts:
    """The parts of a decoder layer. Raises `NotFusable`."""
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        raise NotFusable("it has no part named mlp")
    norms = {name for name, _ in layer.named_children() if name.endswith("layernorm")}
    if norms not in (_LLAMA_NORMS, _GEMMA_NORMS):
        raise NotFusable(f"its norms are {', '.join(sorted(norms)) or 'none'}")
    children = {name for name, _ in layer.named_children()} - norms
    if any(
        next(getattr(layer, name).parameters(), None) is not None
        for name in children
        if getattr(layer, name) is not mlp and getattr(layer, name) is not attention
    ):
        raise NotFusable(f"it has parts beside attention and mlp: {', '.join(sorted(children))}")
    is_gemma = norms == _GEMMA_NORMS
    post_attention = _norm(layer, "post_attention_layernorm")
    query_norm, key_norm = (
        _head_norm(attention, "q_norm", spec),
        _head_norm(attention, "k_norm", spec),
    )
    if query_norm is not None and key_norm is not None and query_norm[1] != key_norm[1]:
        raise NotFusable("its norms of queries and keys differ in epsilon")
    return LayerParts(
        attention=attention,
        spec=spec,
        call=call,
        input_norm=_norm(layer, "input_layernorm"),
        query_norm=query_norm,
        key_norm=key_norm,
        post_attention_norm=post_attention if is_gemma else None,
        pre_mlp_norm=_norm(layer, "pre_feedforward_layernorm") if is_gemma else post_attention,
        post_mlp_norm=_norm(layer, "post_feedforward_layernorm") if is_gemma else None,
        activation=_activation(mlp),
        qkv=_linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        output=_linears(attention, ("o_proj",), "dense"),
        gate_up=_linears(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        down=_linears(mlp, ("down_proj",), "down_proj"),
    )


class FusedLayer:
    """Stands in for the `forward` of a decoder layer on packed tokens `[1, T, C]`."""

    def __init__(
        self,
        parts: LayerParts,
        kernels: CPUKernels,
        make_linear: Callable[[Tensor, Tensor | None], Linear],
    ) -> None:
        self._parts = parts
        self._kernels = kernels
        self._qkv = make_linear(*_merged(parts.qkv))
        self._output = make_linear(*_merged(parts.output))
        self._gate_up = make_linear(*_merged(parts.gate_up))
        self._down = make_linear(*_merged(parts.down))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four products of the layer."""
        return (self._qkv, self._output, self._gate_up, self._down)

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **__: Any,
    ) -> Tensor:
        """`[1, T, C]` to the same; positions are in the two tables `[1, T, R]` of rotations."""
        parts = self._parts
        residual = hidden_states[0].clone()
        normed = torch.empty_like(residual)
        cpu_layers.add_norm(self._kernels, residual, norm=parts.input_norm, out=normed)
        attended = self._attend(normed, *position_embeddings)
        cpu_layers.add_norm(
            self._kernels,
            residual,
            added=self._output(attended),
            added_norm=parts.post_attention_norm,
            norm=parts.pre_mlp_norm,
            out=normed,
        )
        gate_up = self._gate_up(normed)
        activated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        cpu_layers.activate_and_multiply(
            self._kernels, gate_up, activation=parts.activation, out=activated
        )
        cpu_layers.add_norm(
            self._kernels, residual, added=self._down(activated), added_norm=parts.post_mlp_norm
        )
        return residual.unsqueeze(0)

    def _attend(self, normed: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        parts = self._parts
        backend, spec = binding_of(parts.attention)
        num_rotated = spec.num_heads + spec.num_kv_heads
        qkv = self._qkv(normed)
        rotated = qkv[:, : num_rotated * spec.head_dim].unflatten(1, (num_rotated, spec.head_dim))
        values = qkv[:, num_rotated * spec.head_dim :]
        cpu_layers.norm_rope(
            self._kernels,
            rotated,
            num_query_heads=spec.num_heads,
            query_weight=None if parts.query_norm is None else parts.query_norm[0],
            key_weight=None if parts.key_norm is None else parts.key_norm[0],
            epsilon=0.0 if parts.query_norm is None else parts.query_norm[1],
            cosines=cosines[0],
            sines=sines[0],
        )
        attended = backend.forward(
            spec,
            rotated[:, : spec.num_heads],
            rotated[:, spec.num_heads :],
            values.unflatten(1, (spec.num_kv_heads, spec.value_head_dim)),
            scale=parts.call.scale,
            softcap=parts.call.softcap,
            sinks=parts.call.sinks,
        )
        return attended.flatten(1)


def _merged(linears: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias in place of several layers on the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return weight, torch.cat(biases)


def _linears(parent: nn.Module, names: tuple[str, ...], merged: str) -> tuple[nn.Linear, ...]:
    found = [getattr(parent, name, None) for name in names]
    if None in found:
        found = [getattr(parent, merged, None)]
    linears = tuple(module for module in found if type(module) is nn.Linear)
    if len(linears) != len(found):
        raise NotFusable(f"{'/'.join(names)} are no plain linear layers")
    return linears


def _norm(parent: nn.Module, name: str) -> Norm:
    """Weight and epsilon of an RMSNorm, tried on random rows."""
    module = getattr(parent, name)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if weight is None or not isinstance(epsilon, float) or weight.dim() != 1:
        raise NotFusable(f"{name} is no RMSNorm")
    weight = weight.detach().to(torch.float32)
    rows = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0))
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    expected = module(rows)
    for candidate in (weight, 1.0 + weight):
        if torch.allclose(normed * candidate, expected, rtol=1e-5, atol=1e-6):
            return candidate.contiguous(), epsilon
    raise NotFusable(f"{name} is no RMSNorm")


def _head_norm(attention: nn.Module, name: str, spec: LayerSpec) -> Norm | None:
    if getattr(attention, name, None) is None:
        return None
    norm = _norm(attention, name)
    if norm[0].shape[0] != spec.head_dim:
        raise NotFusable(f"{name} does not norm heads apart")
    return norm


def _activation(mlp: nn.Module) -> Activation:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    values = torch.linspace(-6.0, 6.0, 97)
    candidates: dict[Activation, Tensor] = {
        "silu": torch.nn.functional.silu(values),
        "gelu_tanh": torch.nn.functional.gelu(values, approximate="tanh"),
    }
    for name, expected in candidates.items():
        if function is not None and torch.allclose(function(values), expected, atol=1e-6):
            return name
    raise NotFusable("its activation is neither silu nor gelu in its tanh form")
