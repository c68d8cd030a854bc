"""Greedy ids equal `transformers.generate` however the engine cuts the work up.

The oracle is transformers' own model with its own attention and cache, one prompt at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from cbatch_cli.assembly import build_core, load_for_engines
from cbatch_cli.config import DEMO_MODEL, EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_groups import group_layers, sequence_blocks
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.loading import ModelFiles, load_model, resolve_model
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput, SamplingParams
from cbatch_cli.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

DOCUMENTS = Path(__file__).parent / "documents"
# Of each document the first so many tokens, many of them around the edges of blocks (16, 64) and
# budgets, two beyond the model's sliding window (512). Those of one document begin alike.
PROMPT_LENGTHS = {
    "lighthouse": (1, 900, 600, 140, 129, 128, 65, 64, 63, 61, 40, 33),
    "sorting": (110, 97, 66, 64, 62, 24, 17, 16),
    "kitchen": (85, 72, 64, 30, 12, 7),
    "code": (75, 70, 62, 31, 20),
    "languages": (80, 63, 48, 32, 18, 9, 5, 3, 2),
}
MAX_TOKENS = (4, 6, 9, 5, 7, 20, 6, 3, 8, 16)
SHORT = 66
"""The longest prompt of a short row, in tokens."""
TIE = 1e-4
"""Two logits nearer to each other than this may change places by rounding alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What transformers generates for one prompt."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    runners_up: tuple[int, ...]
    """The second most probable id of each step."""
    gaps: tuple[float, ...]
    """By how much its logit was lower."""

    @property
    def first_tie(self) -> int | None:
        """The step from which on another engine may differ."""
        return next((step for step, gap in enumerate(self.gaps) if gap < TIE), None)

    def check(self, output: RequestOutput) -> None:
        """Raise `AssertionError` unless an engine's output is this one, up to a tie."""
        assert output.error is None
        tie = self.first_tie
        if tie is None:
            assert output.token_ids == self.token_ids
        else:
            assert output.token_ids[:tie] == self.token_ids[:tie]
            assert output.token_ids[tie] in (self.token_ids[tie], self.runners_up[tie])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the rows.

    Short rows run apart from long ones where the KV pool is tight, so that it can be as small as
    either allow.
    """

    block_size: int
    budget: int
    max_num_seqs: int
    is_tight: bool
    prefix_caching: bool

    def __str__(self) -> str:
        pool = "tight" if self.is_tight else "ample"
        prefix = "prefix" if self.prefix_caching else "no_prefix"
        return f"block{self.block_size}-budget{self.budget}-seqs{self.max_num_seqs}-{pool}-{prefix}"

    def waves(self, rows: Sequence[Expected]) -> list[list[Expected]]:
        """The rows that run together."""
        if not self.is_tight:
            return [list(rows)]
        short = [row for row in rows if len(row.prompt) <= SHORT]
        return [short, [row for row in rows if len(row.prompt) > SHORT]]

    def engine_config(self, rows: Sequence[Expected], model: HFModel) -> EngineConfig:
        """A tight pool holds the longest of `rows` and little more."""
        longest = max(len(row.prompt) + len(row.token_ids) for row in rows)
        windows = group_layers(model.layer_specs).windows
        num_blocks = sequence_blocks(windows, longest, self.block_size)
        num_blocks = max(3 * len(windows), num_blocks)
        return EngineConfig(
            block_size=self.block_size,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            num_kv_blocks=num_blocks if self.is_tight else 8 * num_blocks,
            prefix_caching=self.prefix_caching,
        )


CASES = [
    Case(block_size=block, budget=budget, max_num_seqs=seqs, is_tight=tight, prefix_caching=prefix)
    for block, budget, seqs, tight, prefix in (
        (1, 16, 1, True, True),
        (1, 64, 3, False, False),
        (1, 2048, 32, True, True),
        (16, 16, 3, False, True),
        (16, 64, 32, True, False),
        (16, 2048, 1, False, False),
        (64, 16, 32, False, False),
        (64, 64, 1, False, True),
        (64, 2048, 3, True, True),
    )
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(DEMO_MODEL)


@pytest.fixture(scope="module")
def oracle(files: ModelFiles) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        files.folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    # What a call leaves out, transformers takes from here.
    model.generation_config = GenerationConfig(pad_token_id=model.generation_config.pad_token_id)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> HFModel:
    """As `cbatch run` loads it on this machine: with the compiled kernels, where they are built."""
    return load_for_engines(DEMO_MODEL, EngineConfig(dtype="float32", device="cpu")).model


@pytest.fixture(scope="module")
def plain_model(files: ModelFiles) -> HFModel:
    """As a machine without a compiler runs it."""
    return load_model(files, dtype="float32", device="cpu", attention_backend="torch")


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(files.folder, trust_remote_code=False)
    found = []
    for name, lengths in PROMPT_LENGTHS.items():
        text = (DOCUMENTS / f"{name}.txt").read_text(encoding="utf-8")
        token_ids = tokenizer(text).input_ids
        assert len(token_ids) >= max(lengths)
        found += [tuple(token_ids[:length]) for length in lengths]
    return found


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> list[Expected]:
    return [
        transformers_generate(oracle, prompt, max_new_tokens=max_tokens)
        for prompt, max_tokens in zip(prompts, itertools.cycle(MAX_TOKENS), strict=False)
    ]


@torch.inference_mode()
def transformers_generate(
    oracle: PreTrainedModel, prompt: Sequence[int], **options: Any
) -> Expected:
    """Greedy, ending at `eos_token_id` if that is among the options."""
    input_ids = torch.tensor([prompt])
    found = oracle.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=GenerationConfig(
            do_sample=False, output_logits=True, return_dict_in_generate=True, **options
        ),
    )
    best = torch.cat(found.logits).topk(2)
    return Expected(
        prompt=tuple(prompt),
        token_ids=tuple(found.sequences[0, len(prompt) :].tolist()),
        runners_up=tuple(best.indices[:, 1].tolist()),
        gaps=tuple((best.values[:, 0] - best.values[:, 1]).tolist()),
    )


def run(core: EngineCore, requests: Iterable[Request]) -> dict[int, RequestOutput]:
    """All outputs by row. Requests are queued before the first step, so that no run differs."""
    rows = set()
    for request in requests:
        core.submit(request)
        rows.add(request.key.row)
    outputs = {}
    for output in core.generate(()):
        assert output.key.row not in outputs
        outputs[output.key.row] = output
    assert set(outputs) == rows
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0.0
    return outputs


def test_the_cases_cover_every_pair_of_settings() -> None:
    assert len(CASES) + 1 <= 10
    settings = {
        "block_size": (1, 16, 64),
        "budget": (16, 64, 2048),
        "max_num_seqs": (1, 3, 32),
        "is_tight": (False, True),
        "prefix_caching": (False, True),
    }
    for (first, values), (second, others) in itertools.combinations(settings.items(), 2):
        found = {(getattr(case, first), getattr(case, second)) for case in CASES}
        assert found == set(itertools.product(values, others)), (first, second)


def test_the_oracle_is_sure_of_its_ids(expected: Sequence[Expected]) -> None:
    assert len(expected) == 40
    assert {len(row.prompt) for row in expected} >= {1, 900}
    assert sum(row.first_tie is not None for row in expected) <= 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_ids_are_those_of_transformers(
    case: Case, model: HFModel, expected: Sequence[Expected]
) -> None:
    check_case(case, model, expected)


def test_greedy_ids_are_the_same_without_compiled_kernels(
    plain_model: HFModel, expected: Sequence[Expected]
) -> None:
    check_case(CASES[4], plain_model, expected)


def requests_of(rows: Sequence[Expected]) -> list[Request]:
    """What asks for these rows."""
    return [
        Request(
            key=RequestKey(row),
            prompt_token_ids=wanted.prompt,
            params=SamplingParams(max_tokens=len(wanted.token_ids), ignore_eos=True),
        )
        for row, wanted in enumerate(rows)
    ]


def check_case(case: Case, model: HFModel, expected: Sequence[Expected]) -> None:
    """Run all rows as the case says and compare."""
    num_checked = num_preemptions = num_cached_tokens = 0
    for rows in case.waves(expected):
        core, _ = build_core(model, case.engine_config(rows, model))
        requests = requests_of(rows)
        random.Random(0).shuffle(requests)
        for row, output in run(core, requests).items():
            rows[row].check(output)
            assert output.finish_reason is FinishReason.LENGTH
            num_checked += 1
        num_preemptions += core.stats.num_preemptions
        num_cached_tokens += core.stats.num_cached_tokens
    assert num_checked == 40
    assert (num_preemptions > 0) == (case.is_tight and case.max_num_seqs > 1)
    assert (num_cached_tokens > 0) == case.prefix_caching


def test_rows_end_where_each_of_them_says(
    model: HFModel,
    oracle: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that end early, late, at EOS, past it, and at ids of their own, all in one batch.

    The model seldom ends a text by itself, so ids that it often writes stand in for its EOS.
    """
    eos_ids, comma = [236761, 107], 236764  # a full stop and a line feed
    monkeypatch.setattr(model, "eos_token_ids", frozenset(eos_ids))
    requests, wanted = [], []
    for prompt in (row for row in prompts if len(row) in (17, 31, 48)):
        for max_tokens, ends, options in (
            (16, eos_ids, {}),
            (11, eos_ids, {"min_tokens": 6}),
            (16, [*eos_ids, comma], {"stop_token_ids": (comma,)}),
            (13, [comma], {"stop_token_ids": (comma,), "ignore_eos": True}),
            (14, None, {"ignore_eos": True}),
        ):
            params = SamplingParams(max_tokens=max_tokens, **options)
            key = RequestKey(len(wanted))
            requests.append(Request(key=key, prompt_token_ids=prompt, params=params))
            wanted.append(
                transformers_generate(
                    oracle,
                    prompt,
                    max_new_tokens=max_tokens,
                    min_new_tokens=options.get("min_tokens"),
                    eos_token_id=ends,
                )
            )
    core, _ = build_core(model, EngineConfig(max_num_seqs=6, max_num_batched_tokens=48))
    outputs = run(core, requests)
    for row, output in outputs.items():
        wanted[row].check(output)
        ends = {*requests[row].params.stop_token_ids}
        ends |= set() if requests[row].params.ignore_eos else set(eos_ids)
        stopped = output.token_ids[-1] in ends
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    reasons = [output.finish_reason for output in outputs.values()]
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons)
