"""The oracle itself against dense attention as torch defines it."""

import pytest
import torch
from cbatch_kernels import reference
from torch import Tensor

from tests.attention.paged_cases import PagedCase, make_case


def dense_inputs(case: PagedCase) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a case's one sequence, which starts empty, as `[H, S, D]`."""
    group_size = case.layer.num_heads // case.layer.num_kv_heads
    key = case.key.transpose(0, 1).repeat_interleave(group_size, dim=0)
    value = case.value.transpose(0, 1).repeat_interleave(group_size, dim=0)
    return case.query.transpose(0, 1), key, value


def dense_mask(num_tokens: int, window: int | None) -> Tensor:
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_equals_scaled_dot_product_attention(window: int | None) -> None:
    case = make_case([(0, 23)], block_size=4, window=window, value_head_dim=6)
    query, key, value = dense_inputs(case)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=dense_mask(23, window), scale=case.scale
    )
    torch.testing.assert_close(case.run_reference()[0], expected.transpose(0, 1))


def test_softcap_and_sinks_are_those_of_gemma_and_gpt_oss() -> None:
    case = make_case([(0, 12)], softcap=1.5, with_sinks=True)
    query, key, value = dense_inputs(case)
    scores = torch.tanh(query @ key.transpose(1, 2) * case.scale / 1.5) * 1.5
    scores = scores.masked_fill(~dense_mask(12, None), -torch.inf)
    assert case.sinks is not None
    sinks = case.sinks.view(-1, 1, 1).expand(-1, 12, 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    expected = (weights @ value).transpose(0, 1)
    torch.testing.assert_close(case.run_reference()[0], expected)


def test_a_chunk_continues_where_the_cache_ends() -> None:
    whole = make_case([(0, 20)], block_size=4, window=7)
    expected, k_cache, v_cache = whole.run_reference()
    metadata = whole.metadata
    tail = reference.paged_attention(
        whole.query[14:],
        k_cache,
        v_cache,
        metadata.block_tables,
        torch.tensor([0, 6]),
        torch.tensor([20]),
        scale=whole.scale,
        sliding_window=7,
    )
    torch.testing.assert_close(tail, expected[14:])
