from __future__ import annotations

import pytest
import torch

from cbatch_cli.engine.kv_cache import KVCache, block_bytes, fit_num_blocks, kv_cost
from cbatch_cli.engine.kv_groups import group_layers
from cbatch_cli.errors import UsageError
from tests.engine.test_kv_groups import gemma3_layers, make_layers


def test_layers_share_tensors_across_groups_only() -> None:
    groups = group_layers(gemma3_layers(18, 512))
    cache = KVCache(
        groups, num_blocks=7, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert len(cache.layers) == 18
    owners: dict[int, set[int]] = {}
    for layer, (keys, values) in zip(groups.layers, cache.layers, strict=True):
        assert keys.shape == values.shape == (7, 4, 1, 256)
        assert keys.is_contiguous() and values.is_contiguous()
        assert keys.data_ptr() != values.data_ptr()
        others = owners.setdefault(keys.data_ptr(), set())
        assert layer.group not in others
        others.add(layer.group)
    assert [len(others) for others in owners.values()] == [6, 6, 6]
    num_bytes = sum(
        tensor.numel() * tensor.itemsize
        for tensor in {t.data_ptr(): t for pair in cache.layers for t in pair}.values()
    )
    assert num_bytes == 7 * block_bytes(groups, block_size=4, dtype=torch.bfloat16)


def test_layers_of_one_group_may_differ_in_shape() -> None:
    groups = group_layers(make_layers(None, None, head_dims={1: 8}))
    cache = KVCache(
        groups, num_blocks=2, block_size=3, dtype=torch.float32, device=torch.device("cpu")
    )
    assert [keys.shape[-1] for keys, _ in cache.layers] == [256, 8]
    assert block_bytes(groups, block_size=3, dtype=torch.float32) == 3 * 4 * (512 + 264)


@pytest.mark.parametrize(
    ("dtype", "block_size", "uniform", "bytes_per_token", "share"),
    [
        (torch.float32, 64, 36_864, 8_304, 0.2253),
        (torch.bfloat16, 16, 18_432, 4_062, 0.2204),
        (torch.bfloat16, 1, 18_432, 4_032, 0.2188),
    ],
)
def test_gemma3_270m_at_8k(
    dtype: torch.dtype, block_size: int, uniform: int, bytes_per_token: int, share: float
) -> None:
    """A sixth of the layers keep 8192 positions, the others 512 and what rounding adds."""
    cost = kv_cost(gemma3_layers(18, 512), context_len=8192, block_size=block_size, dtype=dtype)
    assert cost.uniform_bytes_per_token == uniform
    assert cost.bytes_per_token == bytes_per_token
    assert round(cost.share_of_uniform, 4) == share


def test_a_window_that_is_not_full_saves_nothing() -> None:
    layers = gemma3_layers(18, 512)
    for context_len in (1, 16, 512):
        cost = kv_cost(layers, context_len=context_len, block_size=16, dtype=torch.bfloat16)
        assert cost.num_bytes == cost.num_uniform_bytes


def test_without_windows_every_position_is_kept() -> None:
    cost = kv_cost(make_layers(None, None), context_len=10, block_size=4, dtype=torch.float32)
    assert cost.num_bytes == cost.num_uniform_bytes == 12 * 2 * 512 * 4
    assert cost.share_of_uniform == 1.0


@pytest.mark.parametrize("wrong", ["context_len", "block_size"])
def test_a_cost_needs_a_length_and_a_block_size(wrong: str) -> None:
    sizes = {"context_len": 10, "block_size": 4, wrong: 0}
    with pytest.raises(ValueError, match=f"{wrong} is 0, not at least 1"):
        kv_cost(make_layers(None), dtype=torch.float32, **sizes)


def test_a_pool_is_no_larger_than_what_all_sequences_can_fill() -> None:
    def fit(memory: int, *windows: int | None) -> int:
        return fit_num_blocks(
            memory=memory,
            block_nbytes=100,
            block_size=16,
            windows=windows,
            max_num_seqs=3,
            max_num_batched_tokens=64,
            max_model_len=1000,
        )

    assert fit(10**9, None) == 3 * 63
    # 33 positions touch at most 3 blocks; a step of 64 tokens on three sequences adds 4 + 3.
    assert fit(10**9, None, 33) == 3 * (63 + 3) + 7
    assert fit(1050, None, 33) == 10
    with pytest.raises(UsageError, match=r"hold no block of .* --kv-cache-memory"):
        fit(199, None, 33)
