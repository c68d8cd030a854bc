"""What smaller weights, keys and values change, over 21,000 tokens of documentation and code.

Run by hand, for it takes minutes: `python -m pytest -m "slow and model" -s tests/test_accuracy.py`.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import pydoc_data.topics
import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cbatch_cli.assembly import load_for_engines
from cbatch_cli.attention.cpu_backend import CPUAttentionBackend
from cbatch_cli.config import EngineConfig
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.loading import load_model, resolve_model
from tests.packed_steps import packed_logits

pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = "gemma-3-270m"
ROW_LENGTH = 700
"""Longer than the model's window of 512."""
NUM_ROWS = 30
CHUNKS = [(256,), (1,), (200,), (243,)]
TOKENS_AT_ONCE = 100


@dataclass
class Difference:
    """Sums over tokens; `divergence` is the Kullback-Leibler divergence from the reference."""

    num_tokens: int = 0
    divergence: float = 0.0
    same_first: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0

    def add(self, logits: Tensor, reference: Tensor, next_ids: Tensor) -> None:
        """Compare logits `[T, vocab]`; of the last token no next one is known."""
        targets = torch.cat([next_ids, next_ids[-1:]])
        for start in range(0, len(logits), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            ours, theirs = logits[part].log_softmax(-1), reference[part].log_softmax(-1)
            self.divergence += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
            self.same_first += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            known = targets[part][: len(next_ids) - start, None]
            self.loss -= float(ours[: len(known)].gather(1, known).sum(dtype=torch.float64))
            self.reference_loss -= float(
                theirs[: len(known)].gather(1, known).sum(dtype=torch.float64)
            )
        self.num_tokens += len(logits)

    def perplexity(self, loss: float) -> float:
        return float(torch.tensor(loss / (self.num_tokens - NUM_ROWS)).exp())


def rows_of_text(tokenizer: object) -> list[Tensor]:
    """Half of the rows are documentation, half are source code."""
    prose = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    code = textwrap.dedent(inspect.getsource(argparse) + inspect.getsource(json.decoder))
    rows = []
    for text in (prose, code):
        ids = tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]
        stride = (len(ids) - ROW_LENGTH) // (NUM_ROWS // 2)
        rows += [
            torch.tensor([2, *ids[start : start + ROW_LENGTH - 1]])
            for start in range(0, stride * (NUM_ROWS // 2), stride)
        ]
    return rows


def cached_in(dtype: torch.dtype) -> object:
    def backend(layers: object, caches: list[tuple[Tensor, Tensor]], block_size: int) -> object:
        kept = [(k.to(dtype), v.to(dtype)) for k, v in caches]
        return CPUAttentionBackend(layers, kept, block_size)  # type: ignore[arg-type]

    return backend


def test_what_eight_bit_weights_and_sixteen_bit_keys_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = {
        "w8a16": load_for_engines(MODEL, EngineConfig(quantization="w8a16")).model,
        "w8a8": load_for_engines(MODEL, EngineConfig(quantization="w8a8")).model,
    }
    exact = load_for_engines(MODEL, EngineConfig())
    reference = load_model(resolve_model(MODEL), device="cpu")
    differences = {
        "w8a16": Difference(),
        "float32, keys and values bfloat16": Difference(),
        "w8a16, keys and values bfloat16": Difference(),
        "w8a8": Difference(),
        "w8a8, keys and values bfloat16": Difference(),
    }
    for row in rows_of_text(exact.tokenizer):
        expected = reference.eager_logits(row, torch.arange(len(row)))
        for name, difference in differences.items():
            model = models.get(name.split(",")[0], exact.model)
            dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
            difference.add(whole_logits(model, row, dtype), expected, row[1:])
    with capsys.disabled():
        for name, sums in differences.items():
            mean = sums.divergence / sums.num_tokens
            ours, own = sums.perplexity(sums.loss), sums.perplexity(sums.reference_loss)
            print(f"\n{name}, {sums.num_tokens:,} tokens: KL {mean:.2e},", end=" ")
            print(f"same first token {sums.same_first / sums.num_tokens:.2%},", end=" ")
            print(f"perplexity {ours:.4f}, in float32 {own:.4f}", end="")
    for name, sums in differences.items():
        assert sums.num_tokens >= 20_000
        limit = 1e-4 if "float32" in name else 3e-3
        assert 0.0 < sums.divergence / sums.num_tokens < limit


def whole_logits(model: HFModel, row: Tensor, cache_dtype: torch.dtype) -> Tensor:
    return packed_logits(
        model,
        [row],
        CHUNKS,
        block_size=64,
        make_backend=cached_in(cache_dtype),  # type: ignore[arg-type]
    )[0]
