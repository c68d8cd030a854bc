"""A sampled answer is a function of seed, row and prompt, not of the rows that run beside it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cbatch_cli.api import Engine
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.request import FinishReason, Request, RequestKey, SamplingParams
from tests.tiny_models import save_tiny_model

Answer = tuple[str | None, tuple[int, ...], FinishReason]

WAYS_TO_SAMPLE: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05, "min_tokens": 12},
    {"temperature": 0.0},
    {"seed": 77},
)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def make_requests(count: int = 28) -> list[Request]:
    """Prompts of 1 to 40 bytes, half of which begin alike; answers of 4 to 40 tokens."""
    noise = random.Random(5)
    shared = bytes(noise.choices(range(32, 127), k=40))
    requests = []
    for row in range(count):
        length = noise.randint(1, 40)
        own = bytes(noise.choices(range(32, 127), k=length))
        params = {"temperature": 1.0, **WAYS_TO_SAMPLE[row % len(WAYS_TO_SAMPLE)]}
        requests.append(
            Request(
                key=RequestKey(row),
                prompt_token_ids=tuple(shared[: length - 1] + own[:1] if row % 2 else own),
                params=SamplingParams(max_tokens=noise.randint(12, 40), **params),
            )
        )
    return requests


def start(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(str(folder), dtype="float32", device="cpu", **settings)


def answer(engine: Engine, requests: Iterable[Request]) -> dict[int, Answer]:
    return {
        output.key.row: (output.text, output.token_ids, output.finish_reason)
        for output in engine.generate(requests)
    }


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[int, Answer]:
    """All rows in one large batch."""
    found = answer(start(folder, max_num_seqs=64, max_num_batched_tokens=2048), make_requests())
    assert len({text for text, _, _ in found.values()}) == len(found)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 7},
        {"max_num_seqs": 3, "max_num_batched_tokens": 5, "block_size": 1},
        {"max_num_seqs": 5, "max_num_batched_tokens": 64, "prefix_caching": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 33, "block_size": 4, "num_kv_blocks": 27},
        {"max_num_seqs": 6, "scheduler": "static"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_order_budget_and_neighbours_change_nothing(
    folder: Path, answers: dict[int, Answer], settings: dict[str, Any]
) -> None:
    requests = make_requests()
    random.Random(len(settings)).shuffle(requests)
    engine = start(folder, **settings)
    assert answer(engine, requests) == answers
    core = engine._loaded.client
    assert isinstance(core, EngineCore)
    assert (core.stats.num_preemptions > 0) == ("num_kv_blocks" in settings)


def test_strangers_in_the_batch_change_nothing(folder: Path, answers: dict[int, Answer]) -> None:
    chosen = make_requests()[3::5]
    strangers = [
        Request(key=RequestKey(1000 + row), prompt_token_ids=(row, 1, row), params=SamplingParams())
        for row in range(20)
    ]
    mixed = [request for pair in zip(strangers, chosen, strict=False) for request in pair]
    found = answer(start(folder, max_num_seqs=7, max_num_batched_tokens=19), mixed)
    assert {row: found[row] for row in found if row < 1000} == {
        request.key.row: answers[request.key.row] for request in chosen
    }


def test_a_stop_string_ends_a_row_at_the_same_place_in_any_batch(
    folder: Path, answers: dict[int, Answer]
) -> None:
    def with_stop(rows: Sequence[Request]) -> list[Request]:
        return [
            Request(
                key=request.key,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params.override({"stop": [stops[request.key.row]]}),
            )
            for request in rows
        ]

    texts = {row: text or "" for row, (text, _, _) in answers.items()}
    # A printable character from the end, which may come earlier too; the rest is bad UTF-8.
    stops = {
        row: next((c for c in text[::-1] if " " < c <= "~"), "?") for row, text in texts.items()
    }
    requests = make_requests()
    together = answer(start(folder, max_num_seqs=64), with_stop(requests))
    requests.reverse()
    apart = answer(start(folder, max_num_seqs=2, max_num_batched_tokens=9), with_stop(requests))
    assert apart == together
    num_stopped = 0
    for row, (text, _, reason) in together.items():
        if reason is FinishReason.STOP_SEQUENCE:
            num_stopped += 1
            assert texts[row].startswith(f"{text}{stops[row]}")
    assert num_stopped > 15


def test_the_seed_of_the_run_matters_but_for_rows_with_their_own(
    folder: Path, answers: dict[int, Answer]
) -> None:
    found = answer(start(folder, max_num_seqs=64, seed=1), make_requests())
    same = {row for row in found if found[row] == answers[row]}
    fixed = {
        request.key.row
        for request in make_requests()
        if request.params.is_greedy or request.params.seed is not None
    }
    assert same == fixed
