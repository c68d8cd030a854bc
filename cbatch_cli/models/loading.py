"""From a folder of plain weights to a model that has been checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from cbatch_cli.attention.backend import AttentionBackendName, choose_attention_backend
from cbatch_cli.config import AttentionBackendChoice, DtypeName
from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models.context_length import resolve_max_model_len
from cbatch_cli.models.devices import on_device, resolve_device
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.kv_scales import read_kv_scales
from cbatch_cli.models.model_files import ModelFiles, resolve_model
from cbatch_cli.models.quiet import quiet_transformers
from cbatch_cli.models.self_check import self_check
from cbatch_cli.models.weight_files import file_of_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelFiles", "checked_model", "load_model", "require_decoder", "resolve_model"]

LOGGER = logging.getLogger(__name__)

# What a generation config may say about sampling that a run follows by default.
_GENERATION_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
)
# What it may say that transformers would follow and a run does not, with the value of no effect.
_NOT_FOLLOWED = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}


def load_model(
    files: ModelFiles,
    *,
    dtype: DtypeName = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    attention_backend: AttentionBackendChoice = "auto",
    trust_remote_code: bool = False,
) -> HFModel:
    """Load a model and check it against its own attention code.

    `dtype` auto is the checkpoint's on a GPU, and float32 on a CPU unless that multiplies bfloat16
    natively and the checkpoint holds it. Raises `ModelError` for a model that would give wrong
    answers or cannot be read, `UsageError` for a device that is not there.
    """
    target = resolve_device(device)
    with quiet_transformers():
        config = _load_config(files, trust_remote_code=trust_remote_code)
        length = resolve_max_model_len(config, max_model_len)
        model = _load_weights(
            files,
            config,
            dtype=_resolve_dtype(config, dtype, target),
            device=target,
            trust_remote_code=trust_remote_code,
        )
        hf_model = checked_model(
            model,
            attention_backend,
            max_model_len=length,
            eos_token_ids=_eos_token_ids(model, files),
            generation_defaults=_generation_defaults(model),
        )
    hf_model.kv_scales = read_kv_scales(files.folder, hf_model.attention_names)
    return hf_model


def _resolve_dtype(
    config: PreTrainedConfig, name: DtypeName, device: torch.device
) -> torch.dtype | None:
    """None leaves the choice to the checkpoint."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type != "cpu":
        return None
    stored = config.get_text_config(decoder=True).dtype or config.dtype
    # AVX512-BF16 alone is not enough: there bfloat16 products are slower than float32 ones.
    if stored == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return torch.bfloat16
    return torch.float32


def _load_config(files: ModelFiles, *, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # every kind comes out of a damaged or unknown config
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{files.name} brings code of its own, which runs only with trust_remote_code"
            ) from error
        raise ModelError(f"cannot read the config of {files.name}: {_first_line(error)}") from error
    require_decoder(config)
    return config


def require_decoder(config: PreTrainedConfig) -> None:
    """Raise `ModelError` for a model that is no decoder of text, as far as its config tells."""
    if config.is_encoder_decoder:
        raise ModelError(
            f"models of type {config.model_type} cannot be run: they have an encoder beside their "
            "decoder"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise ModelError(
            f"models of type {config.model_type} cannot be run: they do not generate text"
        )


def _load_weights(
    files: ModelFiles,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            files.folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # modelling code can fail in any way on a config it does not expect
        raise ModelError(f"cannot load {files.name}: {_first_line(error)}") from error
    # transformers fills weights that the checkpoint lacks with random numbers.
    if missing := sorted({*loading["missing_keys"], *map(str, loading["mismatched_keys"])}):
        raise ModelError(
            f"cannot load {files.name}: its files lack {len(missing)} of the weights of a "
            f"{config.model_type} model, {missing[0]} among them"
        )
    _require_finite(model, files)
    return model.eval()


@torch.no_grad()
def _require_finite(model: PreTrainedModel, files: ModelFiles) -> None:
    """Raise `ModelError` for a weight that is NaN or infinite: every answer would come out of it.

    Reads the weights once and copies nothing.
    """
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    if not weights:
        return
    norms = [torch.linalg.vector_norm(weight, dtype=torch.float32) for weight in weights.values()]
    are_finite = torch.stack(norms).isfinite().tolist()
    for (name, weight), is_finite in zip(weights.items(), are_finite, strict=True):
        # The norm of large but finite weights may overflow.
        if not is_finite and not weight.isfinite().all():
            where = file_of_tensor(files.folder, name) or files.folder
            raise ModelError(f"{where} is damaged: the weight {name} holds NaN or infinity")


def checked_model(
    model: PreTrainedModel,
    attention_backend: AttentionBackendChoice,
    *,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    generation_defaults: Mapping[str, Any],
) -> HFModel:
    """`model` run by our attention, and found to compute what it does by its own.

    `model` is in evaluation mode on its device. Raises `ModelError` for a model that
    would not, in one sentence.
    """
    try:
        with on_device(model.device):
            hf_model = HFModel(
                model,
                max_model_len=max_model_len,
                eos_token_ids=eos_token_ids,
                generation_defaults=generation_defaults,
            )
            hf_model.attention_backend = _settle_backend(hf_model, attention_backend)
    except (ModelError, UsageError):
        raise
    except Exception as error:  # modelling code that packed tokens break can fail in any way
        raise ModelError(
            f"models of type {model.config.model_type} cannot be run: packed tokens end in "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error
    return hf_model


def _settle_backend(model: HFModel, name: AttentionBackendChoice) -> AttentionBackendName:
    """The attention backend that gives the model's own logits; torch where a faster one does not.

    Raises as `self_check` does, and whatever a backend raises that was asked for by name.
    """
    choice = choose_attention_backend(name, model.device, model.dtype)
    try:
        self_check(model, choice)
    except Exception as error:
        if name != "auto" or choice == "torch":
            raise
        self_check(model, "torch")
        LOGGER.warning("attention runs on torch, not on %s: %s", choice, _first_line(error))
        return "torch"
    return choice


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _eos_token_ids(model: PreTrainedModel, files: ModelFiles) -> frozenset[int]:
    """From the generation config, else the model's config, else the tokenizer."""
    config = model.config.get_text_config(decoder=True)
    for holder in (model.generation_config, config, model.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    return frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))


def _generation_defaults(model: PreTrainedModel) -> dict[str, Any]:
    config = model.generation_config
    if config is None:
        return {}
    for name, neutral in _NOT_FOLLOWED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            LOGGER.warning("the model's generation config sets %s, which is not followed", name)
    values = {name: getattr(config, name, None) for name in _GENERATION_DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}
