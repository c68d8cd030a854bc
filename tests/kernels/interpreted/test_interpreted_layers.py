"""Norm, rope and gated activation, interpreted, against their meaning in float64."""

from __future__ import annotations

import math

import pytest
import torch
from cbatch_kernels import reference
from cbatch_kernels.layers import Activation, act_and_mul, rms_norm, rope
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])

drawn = settings(deadline=None, derandomize=True, database=None)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, math.nan)


def assert_rounded(actual: Tensor, exact: Tensor, *, num_units: float = 1.0) -> None:
    """Within some units in the last place of the dtype, as rounding once or twice gives."""
    unit = max(torch.finfo(actual.dtype).eps, 4 * torch.finfo(torch.float32).eps)
    # Where terms cancel, what is left is the error of the terms.
    least = max(1e-2 * unit, 1e-6)
    torch.testing.assert_close(
        actual.double(), exact.double(), rtol=num_units * unit, atol=num_units * least
    )


@settings(drawn, max_examples=50)
@given(
    dtype=DTYPES,
    dim=st.sampled_from([16, 64, 80, 128, 1000, 3000]),
    num_outer=st.integers(1, 7),
    num_inner=st.none() | st.integers(1, 5),
    round_before_weight=st.booleans(),
    weight_offset=st.sampled_from([0.0, 1.0]),
    has_residual=st.booleans(),
    in_place=st.booleans(),
)
def test_rms_norm(
    dtype: torch.dtype,
    dim: int,
    num_outer: int,
    num_inner: int | None,
    round_before_weight: bool,
    weight_offset: float,
    has_residual: bool,
    in_place: bool,
) -> None:
    inner = () if num_inner is None else (num_inner,)
    # Heads of a packed projection: rows that do not follow one another.
    packed = random(num_outer, *inner, dim + 16, dtype=dtype)
    states = packed[..., :dim]
    weight = random(dim, dtype=dtype, seed=1)
    residual = random(num_outer, *inner, dim, dtype=dtype, seed=2) if has_residual else None
    total = states if residual is None else states + residual
    expected = reference.rms_norm(
        total.double(),
        weight,
        eps=1e-5,
        round_before_weight=round_before_weight,
        weight_offset=weight_offset,
        dtype=dtype,
    )
    beside = packed[..., dim:].clone()
    output = states if in_place else poisoned(states)
    rms_norm(
        states,
        weight,
        output,
        eps=1e-5,
        round_before_weight=round_before_weight,
        weight_offset=weight_offset,
        residual=residual,
    )
    assert_rounded(output, expected, num_units=2)
    assert torch.equal(packed[..., dim:], beside)
    if residual is not None:
        assert torch.equal(residual, total)


def test_the_two_casting_orders_differ() -> None:
    states = random(64, 128, dtype=torch.bfloat16)
    weight = random(128, dtype=torch.bfloat16, seed=1)
    outputs = []
    for round_before_weight in (True, False):
        outputs.append(poisoned(states))
        rms_norm(states, weight, outputs[-1], eps=1e-6, round_before_weight=round_before_weight)
        expected = reference.rms_norm(
            states.double(),
            weight,
            eps=1e-6,
            round_before_weight=round_before_weight,
            dtype=torch.bfloat16,
        )
        # But for a few that lie between two roundings in float32.
        assert (outputs[-1] == expected).float().mean() > 0.995
    assert (outputs[0] == outputs[1]).float().mean() < 0.9


@settings(drawn, max_examples=40)
@given(
    dtype=DTYPES,
    head_dim=st.sampled_from([16, 64, 80, 128]),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    num_heads=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    num_tokens=st.integers(1, 5),
    is_interleaved=st.booleans(),
    is_transposed=st.booleans(),
)
def test_rope(
    dtype: torch.dtype,
    head_dim: int,
    share: float,
    num_heads: int,
    num_kv_heads: int,
    num_tokens: int,
    is_interleaved: bool,
    is_transposed: bool,
) -> None:
    num_pairs = int(head_dim * share) // 2
    angles = random(num_tokens, num_pairs, dtype=torch.float64, seed=3) * 5
    cos, sin = angles.cos().float(), angles.sin().float()
    states = []
    for seed, heads in enumerate((num_heads, num_kv_heads)):
        if is_transposed:
            states.append(random(heads, num_tokens, head_dim, dtype=dtype, seed=seed))
            states[-1] = states[-1].transpose(0, 1)
        else:
            states.append(random(num_tokens, heads, head_dim, dtype=dtype, seed=seed))
    expected = [
        reference.rope(part.double(), cos.double(), sin.double(), is_interleaved=is_interleaved)
        for part in states
    ]
    rope(*states, cos, sin, is_interleaved=is_interleaved)
    for actual, exact in zip(states, expected, strict=True):
        assert_rounded(actual, exact)


def test_neox_rope_as_models_write_it() -> None:
    query = random(3, 4, 32, dtype=torch.float32)
    key = random(3, 2, 32, dtype=torch.float32, seed=1)
    angles = random(3, 16, dtype=torch.float32, seed=2)
    both = torch.cat([angles, angles], dim=-1)[:, None]
    expected = []
    for states in (query, key):
        first, second = states.chunk(2, dim=-1)
        rotated_half = torch.cat([-second, first], dim=-1)
        expected.append(states * both.cos() + rotated_half * both.sin())
    rope(query, key, angles.cos(), angles.sin())
    torch.testing.assert_close([query, key], expected)


@settings(drawn, max_examples=30)
@given(
    dtype=DTYPES,
    dim=st.sampled_from([1, 16, 100, 2048, 5000]),
    num_tokens=st.integers(1, 4),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    spread=st.sampled_from([1.0, 30.0]),
)
def test_act_and_mul(
    dtype: torch.dtype, dim: int, num_tokens: int, activation: Activation, spread: float
) -> None:
    packed = (random(num_tokens, 2 * dim, dtype=torch.float64) * spread).to(dtype)
    gate, up = packed.chunk(2, dim=1)
    output = poisoned(gate.contiguous())
    act_and_mul(gate, up, output, activation=activation)
    expected = reference.act_and_mul(gate.double(), up.double(), activation=activation, dtype=dtype)
    assert_rounded(output, expected, num_units=3)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_far_out(activation: Activation) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]])
    output = poisoned(gate)
    act_and_mul(gate, torch.ones_like(gate), output, activation=activation)
    assert output.tolist() == [[0.0, 0.0, 0.0, 200.0, pytest.approx(1e30)]]
