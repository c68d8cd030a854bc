from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from cbatch_cli.engine.input_buffer import InputBuffer, pack


def new_buffer(num_bytes: int, *, num_turns: int = 2, may_grow: bool = False) -> InputBuffer:
    return InputBuffer(
        num_bytes,
        device=torch.device("cpu"),
        host_bytes=lambda size: torch.full((size,), 0x7F, dtype=torch.uint8),
        num_turns=num_turns,
        may_grow=may_grow,
    )


arrays = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda shape, dtype, seed: (
            np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)
        ),
        array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6),
        st.sampled_from([np.int32, np.int64, np.float32]),
        st.integers(0, 99),
    ),
)


@given(given_arrays=arrays)
def test_what_is_sent_arrives(given_arrays: dict[str, Any]) -> None:
    buffer = new_buffer(4, may_grow=True)
    sent = buffer.send(buffer.fill(given_arrays, 1))
    assert list(sent) == list(given_arrays)
    for name, array in given_arrays.items():
        assert np.array_equal(sent[name].numpy(), array)
        assert sent[name].numpy().dtype == array.dtype
    offsets = [part.offset for part in pack(given_arrays, 0).parts.values()]
    assert all(offset % 16 == 0 for offset in offsets)


def test_strided_arrays_arrive_too() -> None:
    array = np.arange(24).reshape(4, 6)
    buffer = new_buffer(1000)
    assert np.array_equal(buffer.send(buffer.fill({"a": array.T}, 0))["a"].numpy(), array.T)


def test_a_turn_does_not_touch_what_another_has_not_sent() -> None:
    buffer = new_buffer(1000)
    first = buffer.fill({"a": np.arange(5)}, 0)
    second = buffer.fill({"a": np.arange(5) + 100}, 1)
    assert buffer.send(first)["a"].tolist() == [0, 1, 2, 3, 4]
    assert buffer.send(second)["a"].tolist() == [100, 101, 102, 103, 104]


def test_inputs_of_one_layout_lie_in_one_place() -> None:
    """Which is what a graph reads."""
    buffer = new_buffer(1000)
    one = {"a": np.arange(3), "b": np.arange(4, dtype=np.int32)}
    views = buffer.views(pack(one, 0))
    other = {"a": np.arange(3) + 7, "b": np.arange(4, dtype=np.int32) + 7}
    buffer.send(buffer.fill(other, 1))
    assert views["a"].tolist() == [7, 8, 9] and views["b"].tolist() == [7, 8, 9, 10]


def test_more_than_fits_is_refused_where_memory_must_not_move() -> None:
    buffer = new_buffer(40)
    buffer.fill({"a": np.arange(5)}, 0)
    with pytest.raises(ValueError, match="48 bytes, but there is room for 40"):
        buffer.fill({"a": np.arange(6)}, 0)
