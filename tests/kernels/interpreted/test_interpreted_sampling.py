"""Penalties, filters and noise, interpreted, against their meaning."""

from __future__ import annotations

import math

import torch
from cbatch_kernels import reference
from cbatch_kernels.sampling import filter_thresholds, gumbel_argmax, scale_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

drawn = settings(deadline=None, derandomize=True, database=None)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    """Rows that do not follow one another, with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((num_rows, vocab_size + 16), math.nan)
    buffer[:, :vocab_size] = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    return buffer[:, :vocab_size]


@settings(drawn, max_examples=25)
@given(
    vocab_size=st.sampled_from([1, 16, 1000, 1024, 2500]),
    num_rows=st.integers(1, 3),
    has_penalties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scale_logits(vocab_size: int, num_rows: int, has_penalties: bool, seed: int) -> None:
    logits = random_logits(num_rows, vocab_size, seed=seed)
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_rows, generator=generator)

    temperature = uniform(0.1, 2.0)
    temperature[0] = 0.0
    repetition, frequency, presence = uniform(0.5, 2.0), uniform(-1, 1), uniform(-1, 1)
    counts = torch.randint(0, 3, (5, vocab_size), generator=generator, dtype=torch.int32)
    in_prompt = torch.rand(5, vocab_size, generator=generator) < 0.3
    slots = torch.randint(0, 5, (num_rows,), generator=generator)
    penalties = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "output_counts": counts,
        "in_prompt": in_prompt,
        "slots": slots,
    }
    expected = torch.stack(
        [
            reference.scale_logits(
                logits[row].double(),
                temperature=float(temperature[row]),
                repetition_penalty=float(repetition[row]),
                frequency_penalty=float(frequency[row]),
                presence_penalty=float(presence[row]),
                output_counts=counts[slots[row]] if has_penalties else None,
                in_prompt=in_prompt[slots[row]] if has_penalties else None,
            )
            for row in range(num_rows)
        ]
    )
    scale_logits(logits, temperature, **(penalties if has_penalties else {}))
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def thresholds_of(
    logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    num_rows = logits.shape[0]
    thresholds = torch.full((num_rows,), math.nan)
    filter_thresholds(
        logits,
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        thresholds,
    )
    return thresholds


@settings(drawn, max_examples=25)
@given(
    vocab_size=st.sampled_from([1, 2, 17, 1000, 1500]),
    top_k=st.sampled_from([0, 1, 2, 10, 999, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    num_steps=st.none() | st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_filter_thresholds(
    vocab_size: int, top_k: int, top_p: float, min_p: float, num_steps: int | None, seed: int
) -> None:
    logits = random_logits(2, vocab_size, seed=seed)
    if num_steps:  # many equal logits
        logits.copy_((logits * num_steps).round() / num_steps)
    if vocab_size > 2:
        logits[0, 1] = -math.inf
    thresholds = thresholds_of(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, threshold in zip(logits, thresholds, strict=True):
        kept = row >= threshold
        # Sums in float32 may tip a token that lies on the edge of top_p.
        allowed = [
            row >= reference.filter_threshold(row.double(), top_k=top_k, top_p=p, min_p=min_p) - gap
            for p in (top_p * (1 - 1e-5), min(1.0, top_p * (1 + 1e-5)))
            for gap in (-1e-6, 0.0, 1e-6)
        ]
        assert any(torch.equal(kept, other) for other in allowed)


def test_top_k_is_exact() -> None:
    logits = random_logits(1, 1200)
    values = logits[0].sort(descending=True).values
    for top_k in (1, 2, 50, 1199):
        assert thresholds_of(logits, top_k=top_k).item() == values[top_k - 1]
    assert thresholds_of(logits, top_k=1200).item() == -math.inf


def draw(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    thresholds: Tensor | None = None,
    position: int = 5,
    seed: int = 7,
) -> list[int]:
    num_rows = logits.shape[0]
    token_ids = torch.full((num_rows,), -77)
    gumbel_argmax(
        logits,
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), -math.inf) if thresholds is None else thresholds,
        token_ids,
        seeds=torch.full((num_rows,), seed),
        rows=torch.arange(num_rows) + 2**40,
        samples=torch.arange(num_rows) % 3,
        positions=torch.full((num_rows,), position),
    )
    return token_ids.tolist()


def test_the_draw_is_the_highest_of_logit_plus_noise() -> None:
    for vocab_size, seed in ((1, 3), (5, 3), (4097, 2**63 - 1), (1030, -1)):
        logits = random_logits(2, vocab_size)
        for row, token_id in enumerate(draw(logits, seed=seed)):
            noise = reference.gumbel_noise(
                vocab_size, seed=seed, row=row + 2**40, sample=row % 3, position=5
            )
            scores = logits[row].double() + noise
            assert scores[token_id] > scores.max() - 1e-4


def test_noise_is_that_of_the_engine() -> None:
    import numpy as np

    from cbatch_cli.engine.noise import philox4x32

    counter, key = (1, 2, 3, 2**32 - 1), (2**31, 5)
    words = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert words[0].tolist() == reference.philox4x32(counter, key)


def test_noise_gives_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    counts = torch.zeros(5)
    for row in range(2000):
        noise = reference.gumbel_noise(5, seed=7, row=row % 50, sample=0, position=row // 50)
        counts[(probabilities.log() + noise).argmax()] += 1
    # A share is off by 0.011 as a rule.
    assert (counts / 2000 - probabilities).abs().max() < 0.04
    assert counts[4] == 0


def test_greedy_rows_take_the_first_of_the_highest() -> None:
    logits = random_logits(3, 3000)
    logits[1, [77, 2500]] = 50.0
    assert draw(logits, temperature=0.0) == logits.argmax(dim=-1).tolist()
    assert draw(logits, temperature=0.0)[1] == 77


def test_thresholds_are_kept_to() -> None:
    logits = random_logits(4, 300)
    thresholds = logits.sort(descending=True).values[:, 2].contiguous()
    for position in range(10):
        for row, token_id in enumerate(draw(logits, thresholds=thresholds, position=position)):
            assert logits[row, token_id] >= thresholds[row]


def test_rows_that_mean_nothing_draw_no_token() -> None:
    logits = random_logits(4, 300)
    logits[0, 17] = math.nan
    logits[1] = -math.inf
    logits[2, 299] = math.inf
    assert draw(logits)[:3] == [-1, -1, -1]
    assert draw(logits, temperature=0.0)[:3] == [-1, -1, -1]
    assert draw(logits)[3] >= 0


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(5, 700)
    together = draw(logits)
    token_ids = torch.zeros(1, dtype=torch.int64)
    gumbel_argmax(
        logits[3:4],
        torch.ones(1),
        torch.full((1,), -math.inf),
        token_ids,
        seeds=torch.tensor([7]),
        rows=torch.tensor([3 + 2**40]),
        samples=torch.tensor([0]),
        positions=torch.tensor([5]),
    )
    assert token_ids.item() == together[3]
