"""transformers' own `generate` over padded batches: the baseline that benchmarks compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cbatch_cli.models.model_files import ModelFiles
from cbatch_cli.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PaddedGenerator:
    """A model as transformers runs it, apart from any that an engine has taken over.

    `model` is in evaluation mode on its device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._pad_token_id = model.generation_config.pad_token_id or 0
        # What a call leaves out, transformers takes from here.
        model.generation_config = GenerationConfig(pad_token_id=self._pad_token_id)

    @classmethod
    def load(
        cls, files: ModelFiles, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
    ) -> PaddedGenerator:
        """Load the weights once more, for transformers alone."""
        options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                files.folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                **options,
            )
        return cls(model.eval())

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """Greedy ids of every prompt of one batch, padded on the left.

        The batch runs until each row has met one of `eos_token_ids` or has `max_new_tokens`; after
        such an id a row is padding.
        """
        longest = max(map(len, prompts))
        input_ids = torch.full((len(prompts), longest), self._pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        with quiet_transformers():
            sequences = self._model.generate(
                input_ids.to(self._model.device),
                attention_mask=attention_mask.to(self._model.device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=sorted(eos_token_ids) or None,
                    pad_token_id=self._pad_token_id,
                ),
            )
        token_ids: list[list[int]] = sequences[:, longest:].tolist()
        return token_ids
