"""How transformers' attention layers reach our attention.

transformers looks the attention function of every layer up by the name in the model's config. Two
names are registered: `ATTENTION` runs the layer's part of the step on the backend that hangs on
the module, and builds no masks; `RECORDER` computes nothing and notes what each layer is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cbatch_cli.attention.backend import AttentionBackend
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.errors import ModelError

ATTENTION = "cbatch"
RECORDER = "cbatch_recorder"

_BINDING = "_cbatch_binding"
_RECORDING = "_cbatch_recording"

# Keywords that layers pass along and that change nothing: positions are in the rotated queries
# and keys already, the rest says what to return.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "logits_to_keep",
        "output_router_logits",
        "return_dict",
    }
)

# Masks that carry no mask: every entry says how far back a token sees.
_SEES_ALL = 0
_NOT_CAUSAL = -1


@dataclass(frozen=True, slots=True)
class _Binding:
    backend: AttentionBackend
    layer: LayerSpec


@dataclass(slots=True)
class Recording:
    """The attention layers of one forward pass, in the order in which they ran."""

    modules: list[nn.Module] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        """Have every module of `model` that runs under `RECORDER` noted here."""
        for module in model.modules():
            setattr(module, _RECORDING, self)

    def detach(self, model: nn.Module) -> None:
        """Undo `attach`."""
        for module in model.modules():
            delattr(module, _RECORDING)

    def bind(self, backend: AttentionBackend, layers: Sequence[LayerSpec]) -> None:
        """Have the recorded layers attend through `backend`, as which it is told `layers`."""
        for module, layer in zip(self.modules, layers, strict=True):
            setattr(module, _BINDING, _Binding(backend, layer))

    def unbind(self) -> None:
        """Let go of the backend, if there is one."""
        for module in self.modules:
            vars(module).pop(_BINDING, None)


def binding_of(module: nn.Module) -> tuple[AttentionBackend, LayerSpec]:
    """The backend that an attention layer runs on, and the layer's shape."""
    binding: _Binding = getattr(module, _BINDING)
    return binding.backend, binding.layer


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: `[1, H, T, D]`, `[1, KV, T, D]`, `[1, KV, T, Dv]` to `[1, T, H, Dv]`.

    The window is the one that was recorded for the layer.
    """
    _refuse_unknown(others)
    binding: _Binding | None = getattr(module, _BINDING, None)
    if binding is None:
        _refuse("it has an attention layer that not every forward pass uses")
    if attention_mask is not None:
        _refuse("its attention layers are given a mask of the model's own making")
    output = binding.backend.forward(
        binding.layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Note the layer's shape and window; the output is zeros."""
    _refuse_unknown(others)
    recording: Recording = getattr(module, _RECORDING)
    batch_size, num_heads, num_tokens, head_dim = query.shape
    if batch_size != 1 or key.shape[2] != num_tokens:
        _refuse("its attention layers see other tokens than those of the step")
    if module in recording.modules:
        _refuse("it runs the same attention layer more than once per token")
    if attention_mask is not None:
        sliding_window = _tagged_window(attention_mask)
    elif not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        _refuse("its attention is not causal")
    recording.modules.append(module)
    recording.specs.append(
        LayerSpec(
            index=len(recording.specs),
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            value_head_dim=value.shape[-1],
            sliding_window=sliding_window,
            kind="full" if sliding_window is None else "window",
        )
    )
    return value.new_zeros(1, num_tokens, num_heads, value.shape[-1]), None


def _tagged_mask(
    *,
    mask_function: Callable[..., Tensor],
    q_length: int,
    kv_length: int,
    device: torch.device,
    local_size: int | None = None,
    **others: Any,
) -> Tensor:
    """In place of a mask, a tensor that says which mask the layers would have been given.

    transformers describes a mask as a function of indices, so it can be asked about distances
    that no short forward pass reaches.
    """
    tag = _NOT_CAUSAL
    if _is_causal_window(mask_function, local_size, device):
        tag = _SEES_ALL if local_size is None else local_size
    return torch.full((1, 1, q_length, kv_length), float(tag), device=device)


def _is_causal_window(
    mask_function: Callable[..., Tensor], window: int | None, device: torch.device
) -> bool:
    """Whether a token sees the last `window` positions, or all, itself included, and no other."""
    reach = 1000 if window is None else window
    queries = torch.tensor([0, 1, 2, reach - 1, reach, reach + 1, 2 * reach + 3, 5 * reach])
    offsets = torch.tensor([-reach - 1, -reach, 1 - reach, -1, 0, 1, reach])
    query_index = queries.repeat_interleave(len(offsets))
    key_index = query_index + offsets.repeat(len(queries))
    valid = (query_index >= 0) & (key_index >= 0)
    query_index, key_index = query_index[valid], key_index[valid]
    expected = key_index <= query_index
    if window is not None:
        expected &= key_index > query_index - window
    first = torch.zeros((), dtype=torch.int64, device=device)
    try:
        sees = mask_function(first, first, query_index.to(device), key_index.to(device)).cpu()
    except (IndexError, RuntimeError):
        return False  # it depends on more than the two positions
    return bool((sees == expected).all())


def _tagged_window(mask: Tensor) -> int | None:
    """The window that `_tagged_mask` noted in a mask."""
    tag = int(mask.flatten()[0])
    if not bool((mask == tag).all()):
        _refuse("it changes the attention mask before it attends")
    if tag == _NOT_CAUSAL:
        _refuse("a token does not simply see the tokens before it, or a window of them")
    return None if tag == _SEES_ALL else tag


def _refuse_unknown(keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            if name == "is_causal" and value is True:
                continue
            _refuse(f"its attention layers pass {name!r}, which is not supported")


def _refuse(reason: str) -> NoReturn:
    raise ModelError(reason)


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(RECORDER, _record)
AttentionMaskInterface.register(RECORDER, _tagged_mask)
