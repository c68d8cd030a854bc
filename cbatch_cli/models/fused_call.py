"""A fused layer of compiled kernels as one call, where attention is compiled too."""

from __future__ import annotations

from typing import Any

from cbatch_kernels.cpu_decoder import LayerCall
from cbatch_kernels.cpu_decoder_layer import DecoderLayer, LayerWeights, Workspace
from cbatch_kernels.cpu_library import CPUKernels
from cbatch_kernels.cpu_packed import Linear, OwnLinear
from torch import Tensor

from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.models.attention_hook import binding_of
from cbatch_cli.models.fused_layer import FusedLayer, LayerParts
from cbatch_cli.models.fused_norm import Norm
from cbatch_cli.models.fused_operations import Rotation


class OneCallLayer:
    """Stands in for a `FusedLayer` whose steps are compiled kernels, with the same bits."""

    def __init__(self, fused: FusedLayer, step: DecoderLayer, parts: LayerParts) -> None:
        self._fused, self._step, self._module = fused, step, parts.attention
        self._scale, self._softcap = parts.call.scale, parts.call.softcap
        sinks = parts.call.sinks
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self.layer_index = parts.spec.index
        """Of the attention layer."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four products of the layer."""
        return self._fused.linears

    def __call__(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **__: Any,
    ) -> Tensor:
        """`[1, T, C]` to the same; positions are in the two tables `[1, T, 2R]` of rotations."""
        backend, spec = binding_of(self._module)
        if not isinstance(backend, CPUAttentionBackend):
            unchanged: Tensor = self._fused(hidden_states, position_embeddings=position_embeddings)
            return unchanged
        cosines, sines = position_embeddings
        output: Tensor = self._step(
            hidden_states[0],
            cosines[0],
            sines[0],
            backend.arguments(spec),
            scale=self._scale,
            softcap=self._softcap,
            sinks=self._sinks,
        )
        return output.unsqueeze(0)

    def in_decoder(self, *, tables: int) -> LayerCall:
        """The layer among others, given the step's rotation tables of that number."""
        return LayerCall(
            layer=self._step,
            scale=self._scale,
            softcap=self._softcap,
            sinks=self._sinks,
            tables=tables,
        )


def as_one_call(
    fused: FusedLayer,
    parts: LayerParts,
    rotation: Rotation,
    *,
    kernels: CPUKernels,
    workspace: Workspace,
) -> OneCallLayer | None:
    """`fused` as one call; None where a product is not one of our own."""
    qkv, output, gate_up, down = fused.linears
    if not (
        isinstance(qkv, OwnLinear)
        and isinstance(output, OwnLinear)
        and isinstance(gate_up, OwnLinear)
        and isinstance(down, OwnLinear)
    ):
        return None
    query_norm, key_norm = parts.head_norms or (None, None)
    weights = LayerWeights(
        input_norm=_given(parts.input_norm),
        query_norm=_optional(query_norm),
        key_norm=_optional(key_norm),
        post_attention_norm=_optional(parts.post_attention_norm),
        pre_mlp_norm=_given(parts.pre_mlp_norm),
        post_mlp_norm=_optional(parts.post_mlp_norm),
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        activation=parts.mlp.activation,
        rotates=rotation != "none",
    )
    return OneCallLayer(fused, DecoderLayer(kernels, weights, workspace), parts)


def _given(norm: Norm) -> tuple[Tensor, float]:
    return norm.factor.contiguous(), norm.epsilon


def _optional(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else _given(norm)
