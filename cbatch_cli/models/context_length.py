"""How many positions a model may be given."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cbatch_cli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOGGER = logging.getLogger(__name__)


def resolve_max_model_len(config: PreTrainedConfig, requested: int | None) -> int:
    """The longest prompt plus output in tokens: `requested`, or else all that the model allows.

    Raises `ModelError` if `requested` is more than the model allows or if nothing says how much
    that is.
    """
    text_config = config.get_text_config(decoder=True)
    model_type = text_config.model_type
    trained = getattr(text_config, "max_position_embeddings", None)
    shared = _longest_shared_rope(text_config)
    if shared is not None and (trained is None or shared < trained):
        if requested is not None and requested > shared:
            raise ModelError(
                f"max_model_len {requested} is too long: beyond {shared} tokens the rotary factors "
                f"of {model_type} depend on the longest sequence of a step, so that a row would "
                "change with its neighbours"
            )
        if requested is None:
            LOGGER.warning(
                "max_model_len is %d: beyond that the rotary factors of %s depend on the longest "
                "sequence of a step",
                shared,
                model_type,
            )
        return requested or shared
    if trained is None:
        if requested is None:
            raise ModelError(
                f"the config of {model_type} does not say how long its context is; "
                "set max_model_len"
            )
        return requested
    if requested is not None and requested > trained:
        raise ModelError(
            f"max_model_len {requested} is too long: {model_type} has {trained} positions"
        )
    return requested or int(trained)


def _longest_shared_rope(config: PreTrainedConfig) -> int | None:
    """Up to which length the model's rotary factors are the same for all sequences.

    longrope and dynamic rope choose their factors once per forward pass, from its highest
    position. None if the factors are fixed.
    """
    limits = []
    for rope in _rope_parameters(getattr(config, "rope_parameters", None)):
        rope_type = str(rope.get("rope_type", ""))
        if rope_type == "longrope" or "dynamic" in rope_type:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits.append(original or config.max_position_embeddings)
    return min(limits, default=None)


def _rope_parameters(value: Any) -> Iterator[Mapping[str, Any]]:
    """The rope settings of a config, which are one mapping or one per kind of layer."""
    if isinstance(value, Mapping):
        if "rope_type" in value:
            yield value
        for nested in value.values():
            yield from _rope_parameters(nested)
