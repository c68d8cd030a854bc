from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbatch_cli.attention.metadata import LayerSpec
from cbatch_cli.engine.kv_groups import (
    capacity_tokens,
    group_layers,
    one_group,
    sequence_blocks,
    window_blocks,
)

WINDOWS = st.one_of(st.none(), st.integers(1, 20))


def make_layers(*windows: int | None, head_dims: dict[int, int] | None = None) -> list[LayerSpec]:
    """Layers of one shape, but for those whose head dimension is given by their index."""
    return [
        LayerSpec(
            index=index,
            num_heads=4,
            num_kv_heads=1,
            head_dim=(head_dims or {}).get(index, 256),
            value_head_dim=256,
            sliding_window=window,
            kind="full" if window is None else "window",
        )
        for index, window in enumerate(windows)
    ]


def gemma3_layers(num_layers: int, window: int) -> list[LayerSpec]:
    """Every sixth layer sees everything."""
    return make_layers(*(None if i % 6 == 5 else window for i in range(num_layers)))


@pytest.mark.parametrize(
    ("num_layers", "window", "sizes"),
    [
        (18, 512, [3, 3, 3, 3, 3, 3]),  # 270M
        (26, 512, [4, 4, 4, 4, 4, 2, 4]),  # 1B
        (34, 1024, [5, 5, 5, 5, 5, 4, 5]),  # 4B
    ],
)
def test_groups_of_gemma3(num_layers: int, window: int, sizes: list[int]) -> None:
    groups = group_layers(gemma3_layers(num_layers, window))
    assert groups.windows == (*[window] * (len(sizes) - 1), None)
    found = [sum(layer.group == group for layer in groups.layers) for group in range(len(sizes))]
    assert found == sizes
    assert [len(sharing) for sharing in groups.places][0] == len(sizes)


def test_layers_that_take_turns_make_two_groups() -> None:
    groups = group_layers(make_layers(*[4096, None] * 13))
    assert groups.windows == (4096, None)
    assert [layer.group for layer in groups.layers] == [0, 1] * 13


def test_one_window_is_one_group_of_any_shapes() -> None:
    for window in (None, 9):
        groups = group_layers(make_layers(window, window, head_dims={1: 512}))
        assert groups.windows == (window,)
        assert [len(sharing) for sharing in groups.places] == [1, 1]


def test_unlike_shapes_with_unlike_windows_keep_everything() -> None:
    groups = group_layers(make_layers(9, None, 9, head_dims={1: 512}))
    assert groups == one_group(make_layers(9, None, 9, head_dims={1: 512}))
    assert groups.windows == (None,)
    assert [layer.sliding_window for layer in groups.layers] == [9, None, 9]


@given(windows=st.lists(st.sampled_from([None, 4, 512]), min_size=1, max_size=70))
def test_every_layer_has_one_place(windows: list[int | None]) -> None:
    layers = make_layers(*windows)
    groups = group_layers(layers)
    assert [layer.index for layer in groups.layers] == list(range(len(layers)))
    assert 1 <= len(groups.windows) <= 8
    for layer in groups.layers:
        assert groups.windows[layer.group] == layer.sliding_window == windows[layer.index]
    for sharing in groups.places:
        assert len({layer.group for layer in sharing}) == len(sharing), "one group, one tensor"
    placed = sorted(layer.index for sharing in groups.places for layer in sharing)
    assert placed == list(range(len(layers)))


@given(window=st.integers(1, 40), block_size=st.integers(1, 20))
def test_a_window_touches_so_many_blocks_at_worst(window: int, block_size: int) -> None:
    touched = [
        (first + window - 1) // block_size - first // block_size + 1 for first in range(block_size)
    ]
    assert window_blocks(window, block_size) == max(touched)


@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=4),
    num_blocks=st.integers(1, 60),
    block_size=st.integers(1, 5),
)
def test_capacity_is_the_longest_that_fits(
    windows: list[int | None], num_blocks: int, block_size: int
) -> None:
    capacity = capacity_tokens(windows, num_blocks, block_size)
    if capacity == sys.maxsize:
        assert None not in windows
        capacity = 10_000
    else:
        assert sequence_blocks(windows, capacity + 1, block_size) > num_blocks
    assert sequence_blocks(windows, capacity, block_size) <= num_blocks
