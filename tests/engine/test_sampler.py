from __future__ import annotations

import numpy as np
import pytest
import torch
from cbatch_kernels.cpu_library import CPUKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbatch_cli.engine.likely_tokens import NUM_CANDIDATES
from cbatch_cli.engine.noise import philox4x32, uniforms
from cbatch_cli.engine.sampler import Sampler, keep_filtered
from cbatch_cli.request import SamplingParams
from tests.cpu_variants import each_variant

VOCAB = 64


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: str, key: str, expected: str
) -> None:
    assert (philox4x32(words(counter), words(key)) == words(expected)).all()


def test_noise_is_uniform_and_differs_in_every_coordinate() -> None:
    count = 20_000
    zeros, index = np.zeros(count, np.int64), np.arange(count)
    seeds = np.zeros(count, np.uint64)
    streams = [
        uniforms(seeds=seeds, rows=index, samples=zeros, positions=zeros),
        uniforms(seeds=seeds, rows=zeros, samples=index, positions=zeros),
        uniforms(seeds=seeds, rows=zeros, samples=zeros, positions=index),
        uniforms(seeds=index.astype(np.uint64), rows=zeros, samples=zeros, positions=zeros),
    ]
    for stream in streams:
        assert stream.min() >= 0.0 and stream.max() < 1.0
        assert len(np.unique(stream)) == count
        counts, _ = np.histogram(stream, bins=50, range=(0, 1))
        assert chisquare(counts).pvalue > 1e-4
    high = uniforms(seeds=seeds, rows=index + 2**32, samples=zeros, positions=zeros)
    assert (high != streams[0]).all(), "rows beyond 32 bits have noise of their own"


def reference_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers' own processors give."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(params=st.lists(sampling_params, min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_filters_keep_what_transformers_keeps(params: list[SamplingParams], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB, generator=generator) * 3
    temperature = torch.tensor([[p.temperature] for p in params])
    kept = keep_filtered(
        (logits - logits.max(-1, keepdim=True).values) / temperature,
        top_k=np.array([p.top_k for p in params]),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
    )
    for row, row_params in enumerate(params):
        expected = reference_probabilities(logits[row : row + 1], row_params)[0] > 0
        assert (kept[row] == expected).all()


def test_top_p_looks_at_the_whole_vocabulary_where_the_most_probable_do_not_do() -> None:
    scaled = torch.zeros(1, 50_000)
    scaled[0, 0] = 1e-3
    scaled[0, 1:] -= torch.arange(49_999) * 1e-9
    kept = keep_filtered(
        scaled - scaled.max(),
        top_k=np.array([0]),
        top_p=np.array([0.5]),
        min_p=np.array([0.0]),
    )
    assert 24_000 < int(kept.sum()) < 26_000


def make_sampler(
    params: list[SamplingParams], *, seed: int = 3, kernels: CPUKernels | None = None
) -> Sampler:
    sampler = Sampler(
        num_slots=len(params), seed=seed, eos_token_ids=frozenset({5}), kernels=kernels
    )
    for slot, row_params in enumerate(params):
        sampler.join(slot, row_params, row=slot, sample=0, num_prompt_tokens=10)
    return sampler


@each_variant
@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(sampling_params, min_size=1, max_size=5),
    vocab_size=st.sampled_from([40, 1024, 6000]),
    # With few different logits there are ties, and more tokens to keep than are looked at first.
    spread=st.sampled_from([0.01, 1.0, 20.0]),
    is_rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_compiled_kernels_draw_what_torch_draws(
    kernels: CPUKernels,
    params: list[SamplingParams],
    vocab_size: int,
    spread: float,
    is_rounded: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab_size, generator=generator) * spread
    logits = logits.round() if is_rounded else logits
    slots, positions = np.arange(len(params)), np.arange(len(params)) + 10
    expected = make_sampler(params).sample(logits.clone(), slots, positions)
    actual = make_sampler(params, kernels=kernels).sample(logits.clone(), slots, positions)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.is_broken.tolist() == expected.is_broken.tolist()


@each_variant
def test_kernels_look_at_the_whole_vocabulary_where_the_most_probable_do_not_do(
    kernels: CPUKernels,
) -> None:
    """All logits are alike, so that every filter keeps all of them."""
    params = [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.9),
    ]
    logits = torch.zeros(3, 5000)
    sampler = make_sampler(params, kernels=kernels)
    drawn = [
        sampler.sample(logits.clone(), np.arange(3), np.full(3, position)).token_ids
        for position in range(10, 40)
    ]
    assert all(ids.max() >= NUM_CANDIDATES for ids in np.stack(drawn).T)


@each_variant
def test_kernels_report_logits_that_mean_nothing(kernels: CPUKernels) -> None:
    logits = torch.zeros(4, 2000)
    logits[1, 1999] = torch.nan
    logits[2] = -torch.inf
    params = [SamplingParams(temperature=float(i % 2), top_k=3 * (i % 2)) for i in range(4)]
    sampled = make_sampler(params, kernels=kernels).sample(logits, np.arange(4), np.full(4, 20))
    assert sampled.is_broken.tolist() == [False, True, True, False]


def test_greedy_takes_the_most_probable_whatever_runs_beside_it() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams()]
    logits = torch.randn(3, VOCAB)
    sampled = make_sampler(params).sample(logits.clone(), np.arange(3), np.full(3, 11))
    assert sampled.token_ids[0] == logits[0].argmax() and sampled.token_ids[2] == logits[2].argmax()


def test_samples_follow_the_distribution_of_transformers() -> None:
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    expected = reference_probabilities(logits, params)[0]
    sampler = make_sampler([params])
    counts = np.zeros(VOCAB)
    for start in range(0, 20_000, 500):
        positions = np.arange(start, start + 500) + 10
        slots = np.zeros(500, np.int64)
        sampled = sampler.sample(logits.repeat(500, 1), slots, positions)
        np.add.at(counts, sampled.token_ids, 1)
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    frequencies = expected.double().numpy()[possible]
    assert chisquare(counts[possible], frequencies / frequencies.sum() * 20_000).pvalue > 1e-4


@settings(max_examples=100, deadline=None)
@given(params=st.lists(sampling_params, min_size=2, max_size=12), data=st.data())
def test_a_row_samples_the_same_alone_and_in_any_company(
    params: list[SamplingParams], data: st.DataObject
) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(0))
    sampler = make_sampler(params)
    positions = np.arange(len(params)) + 10
    order = np.array(data.draw(st.permutations(range(len(params)))))
    together = sampler.sample(logits[torch.from_numpy(order)], order, positions[order]).token_ids
    for place, slot in enumerate(order):
        alone = sampler.sample(
            logits[slot : slot + 1].clone(), np.array([slot]), positions[slot : slot + 1]
        )
        assert alone.token_ids[0] == together[place]


def test_a_seed_of_the_row_replaces_the_runs() -> None:
    logits = torch.zeros(1, VOCAB)

    def draw(run_seed: int, row_seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=row_seed)
        sampler = make_sampler([params], seed=run_seed)
        return [
            int(sampler.sample(logits.clone(), np.array([0]), np.array([p])).token_ids[0])
            for p in range(10, 30)
        ]

    assert draw(1, None) != draw(2, None)
    assert draw(1, 9) == draw(2, 9) == draw(9, None)


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(6,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 9.0, 8.0, 7.0
    sampler = make_sampler([params])

    def sample_at(position: int) -> int:
        return int(sampler.sample(logits.clone(), np.array([0]), np.array([position])).token_ids[0])

    assert [sample_at(p) for p in (10, 11, 12)] == [7, 7, 5]


def test_logits_of_inference_mode_can_be_held_back() -> None:
    """A model's logits are such tensors, which refuse to be changed outside of that mode."""
    sampler = Sampler(num_slots=1, seed=0, eos_token_ids=frozenset({7}))
    sampler.join(0, SamplingParams(min_tokens=2), row=0, sample=0, num_prompt_tokens=3)
    with torch.inference_mode():
        logits = torch.zeros(1, VOCAB)
        logits[0, 7] = 1.0
    assert sampler.sample(logits, np.array([0]), np.array([4])).token_ids[0] != 7


def test_logits_that_mean_nothing_are_reported_for_their_row_alone() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    params = [SamplingParams(temperature=float(i % 2)) for i in range(4)]
    sampled = make_sampler(params).sample(logits, np.arange(4), np.full(4, 20))
    assert sampled.is_broken.tolist() == [False, True, True, False]


def test_when_the_largest_logit_is_enough() -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)
    held_back = SamplingParams(temperature=0.0, min_tokens=3)
    sampler = make_sampler([greedy, drawn, held_back, greedy])

    def takes_largest(slots: list[int], position: int) -> bool:
        return sampler.takes_largest(np.array(slots, np.int64), np.full(len(slots), position))

    first_free = int(sampler._min_length[2])
    assert takes_largest([0, 2, 3], first_free) and takes_largest([], first_free)
    assert not takes_largest([0, 1], first_free)
    assert takes_largest([0, 3], first_free - 1)
    assert not takes_largest([3, 2], first_free - 1)
