"""A transformers model that computes packed tokens over our attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from cbatch_kernels.cpu_head import LargestLogits
from torch import Tensor, nn

from cbatch_cli.attention.backend import AttentionBackend, AttentionBackendName
from cbatch_cli.attention.metadata import KVScales, LayerSpec
from cbatch_cli.errors import ModelError
from cbatch_cli.models.attention_hook import ATTENTION, RECORDER, Recording

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_RECORDED_TOKENS = 8

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Token ids, positions and indices to logits, as `HFModel.forward` without its option."""


class OnePass(Protocol):
    """A whole forward pass in place of transformers' own, as far as a backend allows it."""

    def bound_to(self, backend: AttentionBackend, layers: Sequence[LayerSpec]) -> Forward | None:
        """The pass over this backend; None where it has to be transformers' own."""
        ...


class HFModel:
    """A causal language model whose attention layers run on the backend that is bound to it.

    `model` is in evaluation mode on its device. Raises `ModelError` if it keeps state elsewhere
    than in attention layers that we can stand in for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        generation_defaults: Mapping[str, Any],
    ) -> None:
        self._model = model
        self.model_type: str = model.config.model_type
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.generation_defaults = generation_defaults
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.attention_backend: AttentionBackendName = "torch"
        """The backend that was found to give the model's own logits."""
        self.kv_scales: Mapping[int, KVScales] = {}
        """Scales of a KV cache of eight bits that the checkpoint holds, by the layer's index."""
        self.wants_largest = False
        """Whether the forward pass that runs is asked for nothing but each row's largest logit."""
        self.one_pass: OnePass | None = None
        """What takes the place of transformers' forward pass over the backends that it knows."""
        self._bound_pass: Forward | None = None
        self.largest_ids: Tensor | None = None
        """int64 `[N]`, set by a head that found them: its output `[N, 1]` is then their logits."""
        self.num_parameter_bytes = sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        )
        if not model._supports_attention_backend:
            if getattr(model, "_is_stateful", False):
                raise self._refusal("it keeps a recurrent state")
            raise self._refusal("its attention cannot be replaced in transformers")
        self._recording, self.vocab_size = self._record()
        self._model.set_attn_implementation(ATTENTION)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The attention layers in the order in which they run."""
        return tuple(self._recording.specs)

    @property
    def module(self) -> PreTrainedModel:
        """transformers' model, whose layers may be replaced by faster ones."""
        return self._model

    @property
    def embedding(self) -> nn.Module:
        """What token ids are given to."""
        embedding: nn.Module = self._model.get_input_embeddings()
        return embedding

    @property
    def head(self) -> nn.Module | None:
        """What gives the logits, where that is a module."""
        head: nn.Module | None = self._model.get_output_embeddings()
        return head

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        """The modules of `layer_specs`."""
        return tuple(self._recording.modules)

    @property
    def attention_names(self) -> dict[int, str]:
        """The names of `attention_modules` in the model, by the layer's index."""
        names = {module: name for name, module in self._model.named_modules()}
        return {
            spec.index: names[module]
            for spec, module in zip(self.layer_specs, self.attention_modules, strict=True)
        }

    def bind(self, backend: AttentionBackend, layers: Sequence[LayerSpec] | None = None) -> None:
        """Have the attention layers run on `backend` from now on.

        `layers` are `layer_specs` with their KV groups; if not given, all are in one group.
        """
        layers = self.layer_specs if layers is None else layers
        self._recording.bind(backend, layers)
        if self.one_pass is not None:
            self._bound_pass = self.one_pass.bound_to(backend, layers)

    def unbind(self) -> None:
        """Let go of the backend, and so of its KV cache, if nobody else holds them."""
        self._recording.unbind()
        self._bound_pass = None

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """Logits float32 `[N, vocab]` after the tokens at `sample_indices` `[N]` of the pack.

        `token_ids` and `position_ids` are int64 `[T]`: the packed tokens of one step, whose layout
        the bound backend was given by `begin_step`.
        """
        if self._bound_pass is not None:
            return self._bound_pass(token_ids, position_ids, sample_indices)
        return self._logits(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            logits_to_keep=sample_indices,
        )

    def forward_largest(
        self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor
    ) -> Tensor | LargestLogits:
        """As `forward`, but the largest logits alone if the model's head can find them."""
        self.wants_largest = True
        try:
            logits = self.forward(token_ids, position_ids, sample_indices)
            if self.largest_ids is None:
                return logits
            return LargestLogits(values=logits[:, 0], token_ids=self.largest_ids)
        finally:
            self.wants_largest, self.largest_ids = False, None

    @torch.inference_mode()
    def eager_logits(self, token_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """Logits float32 `[N, vocab]` of one sequence `[T]` by the model's own attention code."""
        with self._attention_implementation("eager"):
            return self._logits(
                input_ids=token_ids.unsqueeze(0), logits_to_keep=sample_indices.to(self.device)
            )

    def _logits(self, **inputs: Any) -> Tensor:
        try:
            logits: Tensor = self._model(**inputs, use_cache=False).logits
        except ModelError as error:
            raise self._refusal(str(error)) from None
        return logits[0].float()

    @contextmanager
    def _attention_implementation(self, name: str) -> Iterator[None]:
        self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            self._model.set_attn_implementation(ATTENTION)

    @torch.inference_mode()
    def _record(self) -> tuple[Recording, int]:
        """Run the model once to see its attention layers; also the size of its vocabulary."""
        recording = Recording()
        recording.attach(self._model)
        try:
            with self._attention_implementation(RECORDER):
                token_ids = torch.arange(_NUM_RECORDED_TOKENS, device=self.device)
                logits = self._logits(
                    input_ids=token_ids.unsqueeze(0),
                    position_ids=token_ids.unsqueeze(0),
                    logits_to_keep=token_ids[-1:],
                )
        finally:
            recording.detach(self._model)
        if logits.shape[0] != 1:
            raise self._refusal("it computes logits for every token")
        num_layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if len(recording.specs) < num_layers:
            raise self._refusal(
                f"only {len(recording.specs)} of its {num_layers} layers are attention layers that "
                "can be replaced; the others keep their state elsewhere"
            )
        return recording, logits.shape[1]

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"models of type {self.model_type} cannot be run: {reason}")
