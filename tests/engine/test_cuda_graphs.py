"""Recorded decoding steps give the logits of steps that are not recorded.

A graph here is the list of the operations of its recording with the tensors they were given: it
replays on the same memory and runs no Python again, as a CUDA graph does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.cuda_graphs import DecodeGraphs, graph_sizes
from cbatch_cli.engine.device import GraphCapture
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, RequestOutput, SamplingParams
from cbatch_cli.runner_setup import RunnerSizes, try_graphs
from tests.engine.test_device_runner import (
    GREEDY,
    MIXED_PARAMS,
    ids,
    prompt,
    requests_of,
    run,
    wrapped,
)
from tests.fake_device import LateQueue, RecordingCapture, device_core, runner_of
from tests.tiny_models import VOCAB_SIZE, tiny_model

NAMES = ("llama", "gemma3", "gemma2_softcap", "gpt_oss_sinks")


def graph_core(
    name: str, *, max_num_seqs: int = 6, block_size: int = 4, num_blocks: int = 120, **more: object
) -> tuple[EngineCore, RecordingCapture]:
    core = device_core(
        more.pop("model", None) or wrapped(name),  # type: ignore[arg-type]
        queue=LateQueue(),
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_blocks=num_blocks,
        **more,  # type: ignore[arg-type]
    )
    capture = RecordingCapture()
    assert record(core, capture) is None
    return core, capture


def record(core: EngineCore, capture: GraphCapture) -> str | None:
    scheduler = core.scheduler
    sizes = RunnerSizes(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=scheduler.blocks.block_size,
        num_kv_groups=len(scheduler.blocks.windows),
        max_sequence_tokens=scheduler.max_sequence_tokens,
    )
    return try_graphs(runner_of(core), capture, sizes, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (256, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        (300, (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)),
    ],
)
def test_sizes(max_num_seqs: int, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_the_largest_is_recorded_first_and_the_next_larger_is_taken() -> None:
    order: list[tuple[str, int]] = []

    def note(what: str, size: int) -> None:
        order.append((what, size))

    graphs = DecodeGraphs(
        (1, 2, 5),
        prepare=functools.partial(note, "prepare"),
        decode=functools.partial(note, "decode"),
        capture=RecordingCapture(),
    )
    what = ("prepare", "decode", "decode")
    assert order == [(step, size) for size in (5, 2, 1) for step in what]
    assert graphs.sizes == (1, 2, 5)
    assert [graphs.size_for(n) for n in range(1, 7)] == [1, 2, 5, 5, 5, None]


def watch_logits(core: EngineCore) -> list[Tensor]:
    """Copies of the logits of every step that samples, in order."""
    sampler, seen = runner_of(core)._sampler, []
    sample = sampler.sample

    def watched(logits: Tensor, *others: object) -> Tensor:
        seen.append(logits.clone())
        return sample(logits, *others)  # type: ignore[arg-type]

    sampler.sample = watched  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_have_the_logits_of_eager_ones(name: str) -> None:
    model = HFModel(
        tiny_model(name), max_model_len=96, eos_token_ids=frozenset({7}), generation_defaults={}
    )
    requests = requests_of([GREEDY, MIXED_PARAMS[3], MIXED_PARAMS[4], GREEDY] * 3)

    def generate(core: EngineCore) -> tuple[dict[RequestKey, tuple[int, ...]], list[Tensor]]:
        seen = watch_logits(core)
        return ids(run(core, requests)), seen

    sizes = {"max_num_seqs": 6, "block_size": 4, "num_blocks": 120}
    eager_ids, eager = generate(device_core(model, queue=LateQueue(), **sizes))  # type: ignore[arg-type]
    core, capture = graph_core(name, model=model, **sizes)  # type: ignore[arg-type]
    replayed_ids, replayed = generate(core)
    assert replayed_ids == eager_ids
    assert len(replayed) == len(eager)
    for one, other in zip(replayed, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    counts = [graph.num_replays for graph in capture.graphs]
    assert len(counts) == 4 and sum(count > 1 for count in counts) >= 3, counts


@settings(max_examples=10, deadline=None)
@given(
    params=st.lists(st.sampled_from(MIXED_PARAMS), min_size=1, max_size=9),
    name=st.sampled_from(("llama", "gemma3")),
    spare_blocks=st.integers(0, 6),
    block_size=st.sampled_from([2, 4, 16]),
    max_num_seqs=st.integers(1, 5),
    # With few tokens a step, prompts are computed one token at a time, beside what decodes.
    budget=st.sampled_from([2, 5, 16]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_mixture_of_replayed_and_eager_steps_samples_the_same(
    params: list[SamplingParams],
    name: str,
    spare_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    seed: int,
) -> None:
    requests = requests_of(params)
    sizes = {
        "num_blocks": (2 if name == "gemma3" else 1) * -(-50 // block_size) + spare_blocks,
        "block_size": block_size,
        "max_num_seqs": min(max_num_seqs, budget),
        "max_num_batched_tokens": budget,
        "seed": seed,
    }
    eager = ids(run(device_core(wrapped(name), queue=LateQueue(), **sizes), requests))  # type: ignore[arg-type]
    core, _ = graph_core(name, **sizes)  # type: ignore[arg-type]
    assert ids(run(core, requests)) == eager


def test_dummy_rows_write_to_no_block_and_are_not_sampled() -> None:
    core, capture = graph_core("llama", max_num_seqs=4, num_blocks=40)
    backend = runner_of(core)._backend
    caches = [tensor for pair in backend._caches.values() for tensor in pair]  # type: ignore[attr-defined]
    assert all(bool(cache[:-1].isnan().all()) for cache in caches), "recording has stored nothing"
    before = runner_of(core)._sampler.last_token_ids.clone()
    assert not before.any(), "recording has sampled nothing"
    request = Request(key=RequestKey(0), prompt_token_ids=(1, 2, 3), params=GREEDY)
    other = Request(key=RequestKey(1), prompt_token_ids=(4, 5), params=GREEDY)
    third = Request(key=RequestKey(2), prompt_token_ids=(6,), params=GREEDY)
    run(core, [request, other, third])
    # Three rows ran in the graph of four.
    assert capture.graphs[0].num_replays > 0
    assert int((runner_of(core)._sampler.last_token_ids != 0).sum()) <= 3
    written = int((~caches[0].flatten(2).isnan().any(-1))[:-1].sum())
    # The token sampled last is not computed, but the surplus one may be.
    most = sum(len(r.prompt_token_ids) + GREEDY.max_tokens for r in (request, other, third))
    assert written <= most


def test_steps_with_chunks_are_not_replayed() -> None:
    core, capture = graph_core("llama", max_num_batched_tokens=8)
    steps: list[tuple[bool, int]] = []
    launch = runner_of(core).launch

    def watched(step: object, stats: object) -> object:
        is_decode = all(s.num_tokens == 1 for s in step.scheduled)  # type: ignore[attr-defined]
        steps.append((is_decode, len(step.scheduled)))  # type: ignore[attr-defined]
        return launch(step, stats)  # type: ignore[arg-type]

    runner_of(core).launch = watched  # type: ignore[method-assign, assignment]
    run(core, requests_of([GREEDY] * 9))
    decodes = [num_seqs for is_decode, num_seqs in steps if is_decode]
    assert len(decodes) < len(steps)
    by_size = {graph_sizes(6)[::-1][i]: g.num_replays for i, g in enumerate(capture.graphs)}
    expected = {size: 0 for size in graph_sizes(6)}
    for num_seqs in decodes:
        expected[min(size for size in expected if size >= num_seqs)] += 1
    assert by_size == expected


def test_logits_are_those_of_the_rows_that_sample() -> None:
    """A long prompt goes on, a token at a time, beside a row that samples and comes after it."""
    requests = [
        Request(key=RequestKey(row), prompt_token_ids=prompt(length, row), params=GREEDY)
        for row, length in enumerate((30, 3))
    ]
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 2}
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue(), **sizes), requests))  # type: ignore[arg-type]
    core, capture = graph_core("llama", **sizes)  # type: ignore[arg-type]
    assert ids(run(core, requests)) == expected
    assert capture.graphs[0].num_replays > 10


def test_rows_of_any_length_are_replayed() -> None:
    """Beside the engine on the host, past the widths in which block tables are passed on."""
    model = wrapped("llama")
    requests = [
        Request(key=RequestKey(row), prompt_token_ids=prompt(length, row), params=GREEDY)
        for row, length in enumerate((25, 55, 75))
    ]
    model.attention_backend = "torch"
    config = EngineConfig(block_size=4, num_kv_blocks=100, max_num_batched_tokens=16)
    expected = ids(run(build_core(model, config)[0], requests))
    core, capture = graph_core("llama", block_size=2, num_blocks=200)
    assert ids(run(core, requests)) == expected
    assert sum(graph.num_replays for graph in capture.graphs) > 10


def test_a_model_that_reads_back_from_the_device_runs_eager() -> None:
    model = HFModel(
        tiny_model("mixtral"), max_model_len=96, eos_token_ids=frozenset(), generation_defaults={}
    )
    experts = model.module.model.layers[0].mlp.experts
    forward = experts.forward

    def counting(hidden_states: Tensor, *others: object) -> Tensor:
        assert float(hidden_states.abs().max()) >= 0.0
        return forward(hidden_states, *others)

    experts.forward = counting
    core = device_core(model, queue=LateQueue(), num_blocks=60)
    requests = requests_of([GREEDY] * 5)
    expected = ids(run(core, requests))
    core = device_core(model, queue=LateQueue(), num_blocks=60)
    assert record(core, RecordingCapture()) == (
        "RuntimeError: operation not permitted when stream is capturing"
    )
    assert ids(run(core, requests)) == expected


def test_no_memory_for_graphs_is_no_error() -> None:
    class Small(RecordingCapture):
        def capture(self, work: object) -> object:  # type: ignore[override]
            if self.graphs:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
            return super().capture(work)  # type: ignore[arg-type]

    core = device_core(wrapped("llama"), queue=LateQueue())
    assert record(core, Small()) == "OutOfMemoryError: CUDA out of memory."
    requests: Sequence[Request] = requests_of([GREEDY] * 3)
    outputs: dict[RequestKey, RequestOutput] = run(core, requests)
    assert all(output.error is None for output in outputs.values())
