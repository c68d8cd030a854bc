"""`--deterministic` where Triton runs: what is replaced, what is refused, equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from cbatch_cli.assembly import load_for_engines
from cbatch_cli.attention.triton_backend import TritonAttentionBackend
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.kv_blocks import KVBlocks
from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models import batch_invariant
from cbatch_cli.models.batch_invariant import InvariantLinear, InvariantNorm, make_batch_invariant
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model

# Widths that fill a processor's vectors: torch's activations on a CPU take another path for what
# is left over, and which values that are depends on the batch.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, sliding_window=9, attn_logit_softcapping=4.0, query_pre_attn_scalar=32
    ),
}


def model_of(config: transformers.PreTrainedConfig, *, dtype: torch.dtype) -> HFModel:
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model = HFModel(module, max_model_len=256, eos_token_ids=frozenset(), generation_defaults={})
    model.attention_backend = "triton"
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("gemma2", torch.float32)],
)
def test_linear_layers_and_norms_are_replaced(name: str, dtype: torch.dtype) -> None:
    model = model_of(CONFIGS[name](), dtype=dtype)
    report = make_batch_invariant(model)
    modules = list(model.module.modules())
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    norms = [m for m in modules if type(m).__name__.endswith("RMSNorm")]
    assert (report.num_linears, report.num_norms) == (len(linears), len(norms))
    assert all(isinstance(m.forward, InvariantLinear) for m in linears)
    assert all(isinstance(m.forward, InvariantNorm) for m in norms)


@pytest.mark.parametrize(
    ("name", "module"),
    [("mixtral", "gate (MixtralTopKRouter) computes mm")],
)
def test_what_mixes_tokens_is_refused_by_name(name: str, module: str) -> None:
    model = HFModel(
        tiny_model(name), max_model_len=128, eos_token_ids=frozenset(), generation_defaults={}
    )
    with pytest.raises(UsageError, match="needs Triton's attention on a GPU, not torch"):
        make_batch_invariant(model)
    model.attention_backend = "triton"
    with pytest.raises(ModelError, match="^--deterministic does not work on a GPU") as caught:
        make_batch_invariant(model)
    assert module in str(caught.value)


def test_a_layer_whose_rows_look_at_each_other_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its operations, which a kernel hides, but by the bits."""
    model = model_of(CONFIGS["llama"](), dtype=torch.float32)
    call = InvariantLinear.__call__

    def leaks(self: InvariantLinear, input: torch.Tensor) -> torch.Tensor:
        return call(self, input) * (1.0001 if input.shape[1] > 30 else 1.0)

    monkeypatch.setattr(InvariantLinear, "__call__", leaks)
    with pytest.raises(ModelError, match="a row's logits have other bits beside another row"):
        make_batch_invariant(model)


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states / states.abs().mean(dim=-1, keepdim=True)

    norm = Norm()
    assert batch_invariant._may_be_norm(norm)
    forward = InvariantNorm(norm, round_before_weight=True, weight_offset=0.0)
    assert not batch_invariant._replace(norm, forward, 8)
    assert not batch_invariant._may_be_norm(nn.LayerNorm(8))


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            ),
            params=SamplingParams(max_tokens=6, ignore_eos=True),
        )
        for row, length in enumerate((14, 15, 12))
    ]


def test_an_engine_under_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a row alone, and of the same row among others, preempted and in other chunks."""
    model_of(CONFIGS["qwen3"](), dtype=torch.float32).module.save_pretrained(tmp_path)
    save_tiny_model("llama", tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
    config = EngineConfig(
        device="cpu", dtype="float32", attention_backend="triton", deterministic=True, block_size=16
    )
    lines: list[str] = []
    loaded = load_for_engines(str(tmp_path), config, lines.append)
    assert loaded.fusion is None and loaded.invariance is not None
    assert lines == [
        "deterministic: 8 linear layers and 5 norms run on kernels with fixed tiles, and no "
        "layer is fused"
    ]
    decoded: list[object] = []
    num_preemptions: list[int] = []
    # No room is kept for rows to grow, so that one is preempted soon.
    monkeypatch.setattr(KVBlocks, "headroom", lambda *_: 0)
    monkeypatch.setattr(TritonAttentionBackend, "_decode", lambda *_: decoded.append(_))

    def logits_of(rows: tuple[int, ...], **settings: Any) -> dict[int, tuple[torch.Tensor, ...]]:
        engine = loaded.build_engine(EngineConfig(**{**vars_of(config), **settings}))
        found: dict[int, list[torch.Tensor]] = {}
        sampler = engine.client._runner.runner._sampler  # type: ignore[attr-defined]
        sample = sampler.sample

        def noting(logits: torch.Tensor, slots: Any, positions: Any) -> Any:
            for values, slot in zip(logits, slots.tolist(), strict=True):
                found.setdefault(int(sampler._rows[slot]), []).append(values.clone())
            return sample(logits, slots, positions)

        sampler.sample = noting
        requests = [request for request in make_requests() if request.key.row in rows]
        outputs = list(engine.client.generate(requests))
        assert all(output.error is None for output in outputs)
        num_preemptions.append(engine.client.stats.num_preemptions)
        return {row: tuple(values) for row, values in found.items()}

    together = logits_of((0, 1, 2), max_num_seqs=3, max_num_batched_tokens=23, num_kv_blocks=4)
    assert num_preemptions[0] > 0 and not decoded
    (alone,) = logits_of((2,), max_num_seqs=1, max_num_batched_tokens=64).values()
    for one, other in zip(alone, together[2], strict=True):
        assert torch.equal(one, other)


def vars_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
