"""Every causal language model type of transformers: it works, or it is refused when it is loaded.

A tiny random model of each type runs packed, mixed, chunked steps, whose logits have to equal
those of its own attention on whole rows: in plain PyTorch, with the compiled attention, and with
its layers fused. What came out is recorded in `recipes/models.md`:
`RECORD_COVERAGE=1 python -m pytest tests/models/test_coverage.py` writes that file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from cbatch_kernels.cpu_library import load_kernels
from torch import Tensor

from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.errors import ModelError
from cbatch_cli.models import attention_hook
from cbatch_cli.models.fusion import fuse_layers
from cbatch_cli.models.hf_model import HFModel
from tests.coverage_table import TABLE_PATH, Outcome, coverage_table, recorded_version
from tests.model_zoo import (
    MODEL_TYPES,
    ORIGINAL_POSITIONS,
    WINDOW,
    load_tiny,
    require_decoder_type,
    tiny_config,
)
from tests.packed_steps import BackendMaker, packed_logits
from tests.tiny_models import model_of

TOLERANCE = 1e-5
"""Largest difference of a logit, as a share of the row's largest one."""
FUSED_TOLERANCE = 3e-5
"""Fused layers add in another order, of which a softmax over large scores makes more."""
VISIBLE = 1e-3
"""What a fault has to make of it: a hundred times what rounding does."""
MIN_SHARE_WORKING = 0.5
"""Of the types of any version of transformers; recipes/models.md has the numbers of one."""

# Three rows of very different length: prefills of unlike size, chunks, decodes, a row that starts
# later, and one that is done before the others. The first is longer than every threshold.
LONGEST = 41
ROW_LENGTHS = (LONGEST, 13, 4)
STEPS = [(29, 0, 3), (1, 8, 1), (5, 1, 0), (5, 1, 0), (1, 3, 0)]


@pytest.fixture(autouse=True)
def _transformers_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def logits_of_rows(model: HFModel) -> tuple[list[Tensor], list[Tensor]]:
    """Random rows, as long as the model allows, and their logits by its own attention."""
    generator = torch.Generator().manual_seed(0)
    longest = min(LONGEST, model.max_model_len)
    rows = [
        torch.randint(model.vocab_size, (min(length, longest),), generator=generator)
        for length in ROW_LENGTHS
    ]
    return rows, [model.eager_logits(row, torch.arange(len(row))) for row in rows]


def difference(
    model: HFModel,
    rows: list[Tensor],
    expected: list[Tensor],
    make_backend: BackendMaker = TorchAttentionBackend,
) -> float:
    """The largest difference of packed logits from `expected`, NaN if one is not a number."""
    first = STEPS[0][0] - (LONGEST - len(rows[0]))
    packed = packed_logits(
        model,
        rows,
        [(first, *STEPS[0][1:]), *STEPS[1:]],
        block_size=4,
        make_backend=make_backend,
    )
    errors = [
        (ours - theirs).abs().max() / theirs.abs().max()
        for ours, theirs in zip(packed, expected, strict=True)
    ]
    return torch.stack(errors).max().item()


def narrowed(spec: LayerSpec) -> LayerSpec:
    """A layer that sees one position less, and at most `WINDOW`."""
    return dataclasses.replace(spec, sliding_window=(spec.sliding_window or WINDOW + 1) - 1)


@contextmanager
def other_layers(model: HFModel, change: Callable[[LayerSpec], LayerSpec]) -> Iterator[None]:
    specs = model._recording.specs
    kept = list(specs)
    specs[:] = map(change, kept)
    try:
        yield
    finally:
        specs[:] = kept


@contextmanager
def positions_of_the_pack(model: HFModel) -> Iterator[None]:
    """Positions counted through the pack, as a model does that is not given any."""
    forward = model._model.forward

    def counting(*args: object, position_ids: Tensor, **kwargs: object) -> object:
        counted = torch.arange(position_ids.shape[-1]).expand_as(position_ids)
        return forward(*args, position_ids=counted, **kwargs)

    model._model.forward = counting
    try:
        yield
    finally:
        del model._model.forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Outcome):
    """What came out, with the difference of packed logits without and with a planted fault."""

    error: float = 0.0
    error_of_cpu_kernels: float = 0.0
    error_fused: float = 0.0
    """With the layers fused that can be, also by our compiled kernels."""
    error_fused_on_torch: float = 0.0
    error_narrowed: float = 0.0
    error_repositioned: float = 0.0


def is_refused_as_encoder(config: transformers.PreTrainedConfig) -> bool:
    if getattr(config, "is_decoder", None) is not False:
        return False
    try:
        load_tiny(config)
    except ModelError:
        return True
    return False


@functools.cache
def measure(model_type: str) -> Measured:
    """Each type is measured once, and nothing of the model is kept."""
    try:
        require_decoder_type(model_type)
    except ModelError as error:
        return Measured(kind="no decoder", reason=str(error))
    try:
        model = load_tiny(tiny_config(model_type))
    except ModelError as error:
        return Measured(kind="refused", reason=str(error))
    rows, expected = logits_of_rows(model)
    error = difference(model, rows, expected)
    with other_layers(model, narrowed):
        error_narrowed = difference(model, rows, expected)
    with positions_of_the_pack(model):
        error_repositioned = difference(model, rows, expected)
    error_of_cpu_kernels = difference(model, rows, expected, CPUAttentionBackend)
    report = fuse_layers(model, mode="deterministic", kernels=load_kernels())
    num_parts = sum(part.num_fused for part in report.parts.values())
    other = HFModel(
        model_of(tiny_config(model_type)),
        max_model_len=model.max_model_len,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
    fuse_layers(other)
    return Measured(
        kind="works",
        needs_is_decoder=is_refused_as_encoder(tiny_config(model_type, as_decoder=False)),
        fused="layers"
        if report.num_fused == report.num_layers
        else "parts"
        if report.num_fused + num_parts
        else "nothing",
        error=error,
        error_of_cpu_kernels=error_of_cpu_kernels,
        error_fused=difference(model, rows, expected, CPUAttentionBackend),
        error_fused_on_torch=difference(other, rows, expected),
        error_narrowed=error_narrowed,
        error_repositioned=error_repositioned,
    )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_type_works_or_is_refused(model_type: str) -> None:
    outcome = measure(model_type)
    if outcome.kind == "works":
        assert outcome.error <= TOLERANCE
        assert outcome.error_of_cpu_kernels <= TOLERANCE
        assert max(outcome.error_fused, outcome.error_fused_on_torch) <= FUSED_TOLERANCE
        # Else the comparison would not see how far a token sees, or where it stands.
        assert outcome.error_narrowed > VISIBLE
        assert outcome.error_repositioned > VISIBLE
    else:
        assert re.fullmatch(r"[^\n]{20,250}", outcome.reason)
        assert re.search(r"^cannot load \S+: | cannot be run: ", outcome.reason)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_refusal_does_not_need_rows_beyond_a_threshold(model_type: str) -> None:
    """The rows of a check at load are short: windows and the like must be seen without them."""
    outcome = measure(model_type)
    if outcome.kind == "no decoder":
        with pytest.raises(ModelError):
            require_decoder_type(model_type)
        return
    config = tiny_config(model_type, thresholds=False, as_decoder=False)
    if outcome.kind == "works" and not outcome.needs_is_decoder:
        load_tiny(config)
    else:
        with pytest.raises(ModelError):
            load_tiny(config)


def test_most_types_work() -> None:
    kinds = [measure(model_type).kind for model_type in MODEL_TYPES]
    assert kinds.count("works") >= MIN_SHARE_WORKING * len(kinds)


def test_the_table_is_up_to_date() -> None:
    table = coverage_table({model_type: measure(model_type) for model_type in MODEL_TYPES})
    if os.environ.get("RECORD_COVERAGE"):
        TABLE_PATH.write_text(table)
    recorded = TABLE_PATH.read_text()
    if recorded_version(recorded) != transformers.__version__:
        pytest.skip(f"the table is of transformers {recorded_version(recorded)}")
    assert recorded == table


# Beside its default, a type may have settings that compute otherwise.
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
SHARED_ROPES = ("dynamic", "longrope")


def roped(name: str) -> transformers.PreTrainedConfig:
    rope = {"rope_type": name, "rope_theta": 100.0, **ROPES[name]}
    if name == "dynamic":  # grows beyond the positions that the model has
        settings = {"max_position_embeddings": ORIGINAL_POSITIONS}
    else:
        settings = {}
        rope["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    return tiny_config("llama", rope_parameters=rope, **settings)


@pytest.mark.parametrize("name", ROPES)
def test_scaled_positions(name: str) -> None:
    model = load_tiny(roped(name))
    assert (model.max_model_len == ORIGINAL_POSITIONS) == (name in SHARED_ROPES)
    rows, expected = logits_of_rows(model)
    assert difference(model, rows, expected) <= TOLERANCE


@pytest.mark.parametrize("name", SHARED_ROPES)
def test_rows_that_share_factors_would_be_seen(name: str) -> None:
    model = HFModel(
        model_of(roped(name)),
        max_model_len=LONGEST,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
    rows, expected = logits_of_rows(model)
    assert difference(model, rows, expected) > VISIBLE


@pytest.mark.parametrize("model_type", ["bert", "gemma3_text"])
def test_a_causal_mask_on_a_bidirectional_model_would_be_seen(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sees_all(*, q_length: int, kv_length: int, **_: object) -> Tensor:
        return torch.full((1, 1, q_length, kv_length), float(attention_hook._SEES_ALL))

    settings = {"use_bidirectional_attention": True} if model_type == "gemma3_text" else {}
    config = tiny_config(model_type, as_decoder=False, **settings)
    with pytest.raises(ModelError, match="a token does not simply see the tokens before it"):
        load_tiny(config)
    transformers.AttentionMaskInterface.register(attention_hook.RECORDER, sees_all)
    try:
        with pytest.raises(ModelError, match="differ from those of their own attention"):
            load_tiny(config)
    finally:
        transformers.AttentionMaskInterface.register(
            attention_hook.RECORDER, attention_hook._tagged_mask
        )


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "Granite 4 without recurrent layers": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 3},
    ),
    "LFM2 without convolutions": ("lfm2", {"layer_types": ["full_attention"] * 3}),
    "Mistral without window": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant(name: str) -> None:
    model_type, settings = VARIANTS[name]
    model = load_tiny(tiny_config(model_type, **settings))
    rows, expected = logits_of_rows(model)
    assert difference(model, rows, expected) <= TOLERANCE
