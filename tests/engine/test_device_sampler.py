"""The device's sampler keeps the promises of the host's; its noise is added to logits instead."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from cbatch_cli.engine.device_sampler import DeviceSampler
from cbatch_cli.engine.sampler import Sampler, keep_filtered
from cbatch_cli.request import SamplingParams
from tests.engine.test_sampler import reference_probabilities, sampling_params
from tests.fake_device import CPU, PlainSampling, noise_of

VOCAB = 64
EOS = frozenset({5})


def make_sampler(params: list[SamplingParams], *, seed: int = 3) -> DeviceSampler:
    """Slot i is the row 2**33 + i, of which it is sample i % 3; prompts have 10 tokens."""
    sampler = DeviceSampler(
        num_slots=len(params), seed=seed, eos_token_ids=EOS, device=CPU, kernels=PlainSampling()
    )
    for slot, row_params in enumerate(params):
        sampler.join(slot, row_params, row=2**33 + slot, sample=slot % 3, num_prompt_tokens=10)
    return sampler


def sample(
    sampler: DeviceSampler, logits: Tensor, slots: list[int], positions: list[int]
) -> list[int]:
    plan = sampler.plan(np.array(slots), np.array(positions))
    inputs = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    token_ids: list[int] = sampler.sample(logits.clone(), plan, inputs).tolist()
    return token_ids


def random_logits(num_rows: int, *, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(sampling_params | st.just(SamplingParams()), min_size=1, max_size=7),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(10, 2**31),
)
def test_the_id_is_the_best_of_what_is_kept_with_noise_added(
    params: list[SamplingParams], seed: int, position: int
) -> None:
    logits = random_logits(len(params), seed=seed % 1000)
    slots = list(range(len(params)))
    actual = sample(make_sampler(params, seed=seed), logits, slots, [position] * len(params))
    for slot, row_params in enumerate(params):
        row = logits[slot].double()
        if row_params.temperature > 0:
            scaled = (logits[slot : slot + 1] - logits[slot].max()) / row_params.temperature
            kept = keep_filtered(
                scaled,
                top_k=np.array([row_params.top_k]),
                top_p=np.array([row_params.top_p]),
                min_p=np.array([row_params.min_p]),
            )[0]
            noise = noise_of(VOCAB, seed=seed, row=2**33 + slot, sample=slot % 3, position=position)
            row = torch.where(kept, scaled[0].double() + noise, -math.inf)
        # Sums in another precision may tip a token that lies on the edge of top_p.
        assert row[actual[slot]] == row.max() or row_params.top_p < 1.0
        assert row[actual[slot]] > -math.inf or row_params.top_p < 1.0


def test_samples_follow_the_distribution_of_transformers() -> None:
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)
    logits = random_logits(1, seed=1)
    expected = reference_probabilities(logits, params)[0]
    sampler = make_sampler([params])
    counts = np.zeros(VOCAB)
    for start in range(0, 4000, 500):
        positions = list(range(start + 10, start + 510))
        np.add.at(counts, sample(sampler, logits.repeat(500, 1), [0] * 500, positions), 1)
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    frequencies = expected.double().numpy()[possible]
    assert chisquare(counts[possible], frequencies / frequencies.sum() * 4000).pvalue > 1e-4


@settings(max_examples=50, deadline=None)
@given(params=st.lists(sampling_params, min_size=2, max_size=9), data=st.data())
def test_a_row_samples_the_same_alone_and_in_any_company(
    params: list[SamplingParams], data: st.DataObject
) -> None:
    logits = random_logits(len(params))
    sampler = make_sampler(params)
    order = data.draw(st.permutations(range(len(params))))
    positions = [10 + slot for slot in order]
    together = sample(sampler, logits[torch.tensor(order)], order, positions)
    for place, slot in enumerate(order):
        alone = sample(sampler, logits[slot : slot + 1], [slot], [10 + slot])
        assert alone == [together[place]]


def test_a_seed_of_the_row_replaces_the_runs() -> None:
    logits = torch.zeros(1, VOCAB)

    def draw(run_seed: int, row_seed: int | None) -> list[int]:
        sampler = make_sampler([SamplingParams(temperature=1.0, seed=row_seed)], seed=run_seed)
        return [sample(sampler, logits, [0], [p])[0] for p in range(10, 30)]

    assert draw(1, None) != draw(2, None)
    assert draw(1, 2**64 - 1) == draw(2, 2**64 - 1) == draw(2**64 - 1, None)


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    held, ignores, free = (
        SamplingParams(min_tokens=2, stop_token_ids=(6,)),
        SamplingParams(min_tokens=2, ignore_eos=True),
        SamplingParams(),
    )
    logits = torch.zeros(3, VOCAB)
    logits[:, 5], logits[:, 6], logits[:, 7] = 9.0, 8.0, 7.0
    sampler = make_sampler([held, ignores, free])
    found = [sample(sampler, logits, [0, 1, 2], [p] * 3) for p in (10, 11, 12)]
    assert found == [[7, 5, 5], [7, 5, 5], [5, 5, 5]]


def test_logits_that_mean_nothing_are_minus_one_for_their_row_alone() -> None:
    logits = torch.zeros(6, VOCAB)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 9] = torch.inf
    host = Sampler(num_slots=6, seed=3, eos_token_ids=EOS)
    params = [SamplingParams(temperature=float(i % 2)) for i in range(6)]
    for slot, row_params in enumerate(params):
        host.join(slot, row_params, row=slot, sample=0, num_prompt_tokens=10)
    expected = host.sample(logits.clone(), np.arange(6), np.full(6, 20)).is_broken.tolist()
    sampler = make_sampler(params)
    actual = sample(sampler, logits, list(range(6)), [20] * 6)
    assert [token_id < 0 for token_id in actual] == expected
    assert expected == [False, True, True, True, False, False]
    assert (sampler.last_token_ids >= 0).all(), "the next step looks them up"


def test_the_ids_are_what_the_next_step_finds() -> None:
    sampler = make_sampler([SamplingParams()] * 4)
    logits = random_logits(2)
    found = sample(sampler, logits, [2, 0], [11, 11])
    assert sampler.last_token_ids.tolist() == [found[1], 0, found[0], 0]


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-4])
def test_hardly_any_temperature_takes_one_of_the_most_probable(temperature: float) -> None:
    logits = random_logits(1)
    logits[0, [7, 30]] = 50.0
    sampler = make_sampler([SamplingParams(temperature=temperature)])
    found = {sample(sampler, logits, [0], [p])[0] for p in range(10, 40)}
    assert found == {7, 30}


def test_parameters_are_sent_again_only_after_a_join() -> None:
    sampler = make_sampler([SamplingParams(), SamplingParams(temperature=1.0, top_k=1)])
    slots, positions = np.array([1]), np.array([11])
    sent = {"floats", "integers", "top_k"}
    assert sent <= set(sampler.plan(slots, positions).arrays)
    assert not sent & set(sampler.plan(slots, positions).arrays)
    sampler.join(0, SamplingParams(temperature=0.5), row=9, sample=1, num_prompt_tokens=1)
    assert sent <= set(sampler.plan(slots, positions).arrays)


def test_what_no_row_asks_for_is_not_computed() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(top_k=3),
    ]
    sampler = make_sampler(params)

    def asked(*slots: int) -> tuple[bool, bool]:
        plan = sampler.plan(np.array(slots), np.full(len(slots), 11))
        return plan.is_random, plan.is_filtered

    assert asked(0, 3) == (False, False)
    assert asked(0, 1, 3) == (True, False)
    assert asked(0, 2) == (True, True)
