"""Norms, rotations and activations against float64."""

import pytest
import torch
from cbatch_kernels import cpu_layers
from cbatch_kernels.cpu_library import CPUKernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cpu_variants import each_variant, random

DIMS = st.sampled_from([1, 3, 16, 64, 100, 640])


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    rows = rows.double()
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.sampled_from([0, 1, 5, 40]),
    dim=DIMS,
    seed=st.integers(0, 2**32),
    adds=st.booleans(),
    norms_added=st.booleans(),
    norms=st.booleans(),
)
def test_add_norm(
    kernels: CPUKernels,
    num_rows: int,
    dim: int,
    seed: int,
    adds: bool,
    norms_added: bool,
    norms: bool,
) -> None:
    residual, added = random(seed, num_rows, dim), random(seed + 1, num_rows, dim)
    added_weight, weight = random(seed + 2, dim), random(seed + 3, dim)
    expected = residual.double()
    if adds:
        expected = expected + (rms_norm(added, added_weight, 1e-3) if norms_added else added)
    out = torch.full_like(residual, torch.nan)
    cpu_layers.add_norm(
        kernels,
        residual,
        added=added if adds else None,
        added_norm=(added_weight, 1e-3) if norms_added else None,
        norm=(weight, 1e-6) if norms else None,
        out=out if norms else None,
    )
    close = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(residual.double(), expected, **close)
    if norms:
        torch.testing.assert_close(out.double(), rms_norm(residual, weight, 1e-6), **close)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As transformers' `apply_rotary_pos_emb`, on the first values of each head."""
    rotary_dim = cosines.shape[1]
    turned, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    half_turned = torch.cat([-high, low], dim=-1)
    turned = turned * cosines[:, None].double() + half_turned * sines[:, None].double()
    return torch.cat([turned, rest], dim=-1)


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 6, 30]),
    num_query_heads=st.integers(1, 4),
    num_key_heads=st.integers(1, 2),
    dims=st.sampled_from([(4, 2), (16, 16), (64, 64), (80, 20), (256, 256)]),
    seed=st.integers(0, 2**32),
    norms=st.booleans(),
)
def test_norm_rope(
    kernels: CPUKernels,
    num_tokens: int,
    num_query_heads: int,
    num_key_heads: int,
    dims: tuple[int, int],
    seed: int,
    norms: bool,
) -> None:
    head_dim, rotary_dim = dims
    num_heads = num_query_heads + num_key_heads
    whole = random(seed, num_tokens, num_heads + num_key_heads, head_dim)
    values = whole[:, num_heads:].clone()
    heads = whole[:, :num_heads]
    weights = random(seed + 1, 2, head_dim)
    cosines, sines = random(seed + 2, 2, num_tokens, rotary_dim)
    query, key = heads[:, :num_query_heads], heads[:, num_query_heads:]
    if norms:
        query, key = rms_norm(query, weights[0], 1e-6), rms_norm(key, weights[1], 1e-6)
    expected = rotate(torch.cat([query, key], dim=1).double(), cosines, sines)
    cpu_layers.norm_rope(
        kernels,
        heads,
        num_query_heads=num_query_heads,
        query_weight=weights[0] if norms else None,
        key_weight=weights[1] if norms else None,
        epsilon=1e-6,
        cosines=cosines,
        sines=sines,
    )
    torch.testing.assert_close(heads.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, num_heads:], values)


@each_variant
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 15, 64, 2048])
def test_activate_and_multiply(
    kernels: CPUKernels, activation: cpu_layers.Activation, size: int
) -> None:
    gate_up = random(size, 9, 2 * size) * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0], gate_up[3, 0] = 0.0, 95.0, -95.0, -1e-8
    out = torch.full((9, size), torch.nan)
    cpu_layers.activate_and_multiply(kernels, gate_up, activation=activation, out=out)
    gate, up = gate_up.double().chunk(2, dim=1)
    if activation == "silu":
        expected = torch.nn.functional.silu(gate) * up
    else:
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=1e-6)


@each_variant
def test_tensors_that_do_not_fit_are_refused(kernels: CPUKernels) -> None:
    rows = random(0, 4, 8)
    with pytest.raises(ValueError, match="contiguous float32"):
        cpu_layers.add_norm(kernels, rows.double())
    with pytest.raises(ValueError, match="contiguous float32"):
        cpu_layers.activate_and_multiply(kernels, rows.t(), activation="silu", out=rows)
    with pytest.raises(ValueError, match="heads"):
        cpu_layers.norm_rope(
            kernels,
            random(0, 4, 2, 8).transpose(0, 1),
            num_query_heads=1,
            query_weight=None,
            key_weight=None,
            epsilon=0.0,
            cosines=rows,
            sines=rows,
        )
