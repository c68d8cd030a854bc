from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch_cli.data.json_rows import MAX_NESTING, dump_value, parse_object
from cbatch_cli.errors import RowErrorType, RowFailedError


def failure(line: bytes) -> tuple[RowErrorType, str]:
    with pytest.raises(RowFailedError) as caught:
        parse_object(line)
    return caught.value.error.type, caught.value.error.message


def nested(depth: int) -> bytes:
    """An object `depth` levels deep, itself counted."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


# Infinity and NaN have tests of their own.
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(objects)
def test_agrees_with_the_standard_library_on_every_object(value: dict[str, Any]) -> None:
    for ensure_ascii in (True, False):
        line = json.dumps(value, ensure_ascii=ensure_ascii)
        # By repr, under which 1 is not 1.0.
        assert repr(parse_object(line.encode())) == repr(json.loads(line))


@given(st.binary())
def test_no_bytes_do_more_than_fail_the_row(line: bytes) -> None:
    try:
        parse_object(line)
    except RowFailedError as error:
        assert error.error.type in (RowErrorType.INVALID_JSON, RowErrorType.BAD_TYPE)


@pytest.mark.parametrize(
    "number",
    [
        2**63 - 1,
        -(2**63),
        2**63,
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        123456789012345678901234567890,
        10**400,
        10**4299,
    ],
)
def test_integers_keep_all_their_digits(number: int) -> None:
    value = parse_object(f'{{"a": {number}, "b": [{{"c": {number}}}]}}'.encode())
    assert value == {"a": number, "b": [{"c": number}]}
    assert type(value["a"]) is int


def test_an_integer_with_too_many_digits_fails_the_row() -> None:
    kind, message = failure(b'{"a": 1' + b"0" * 5000 + b"}")
    assert kind is RowErrorType.INVALID_JSON
    assert "digits" in message


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_non_finite_numbers_become_floats(text: str) -> None:
    value = parse_object(f'{{"a": {text}}}'.encode())["a"]
    assert type(value) is float
    assert not math.isfinite(value)


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": "\\ud800"}',
        b'{"a": "\\uDBFFx"}',
        b'{"a": [{"b": "\\udc00"}]}',
        b'{"\\ud800": 1}',
        b'{"a": NaN, "b": "\\ud800"}',
        b'{"n": 1234567890123456789, "b": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff"}',
        b'{"a": NaN, "b": "\xff"}',
    ],
)
def test_text_that_utf8_cannot_hold_fails_the_row(line: bytes) -> None:
    assert failure(line)[0] is RowErrorType.INVALID_JSON


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00", "n": NaN}')["a"] == "\U0001f600"


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 1000, 1025, 20_000, 200_000])
def test_deep_nesting_fails_the_row(depth: int) -> None:
    kind, message = failure(nested(depth))
    assert kind is RowErrorType.INVALID_JSON
    assert "nested" in message
    assert failure(nested(depth).replace(b"[]", b"[NaN]"))[0] is RowErrorType.INVALID_JSON
    assert failure(b'{"a":' * depth)[0] is RowErrorType.INVALID_JSON


def test_nesting_up_to_the_limit_is_read_and_written() -> None:
    line = nested(MAX_NESTING)
    assert dump_value(parse_object(line)).encode() == line
    with_long_number = line.replace(b"[]", b"[100000000000000000000]")
    assert (
        dump_value({"x": parse_object(with_long_number)}) == f'{{"x":{with_long_number.decode()}}}'
    )


def test_many_brackets_side_by_side_are_not_nesting() -> None:
    line = b'{"a":[' + b",".join([b"[{}]"] * 1000) + b"]}"
    assert len(parse_object(line)["a"]) == 1000


@pytest.mark.parametrize("line", [b"[1, 2, 3]", b'"text"', b"1", b"1.5", b"null", b"true", b"NaN"])
def test_a_line_that_is_no_object_has_the_wrong_type(line: bytes) -> None:
    assert failure(line)[0] is RowErrorType.BAD_TYPE


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": "broken',
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1} {"a": 2}',
        b'{"a": 01}',
        b'{"a": "\x00"}',
        b'{"a": 1}\x00',
        b"{",
        b"\x00",
        b"hello",
        b"\xff\xfe{\x00}\x00",
    ],
)
def test_broken_json_is_named_with_a_position_and_without_its_text(line: bytes) -> None:
    kind, message = failure(line)
    assert kind is RowErrorType.INVALID_JSON
    assert "broken" not in message
    assert any(character.isdigit() for character in message)


def test_the_last_of_repeated_keys_counts() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}
    assert parse_object(b'{"a": 1, "a": NaN, "a": 2}') == {"a": 2}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(values)
def test_dumped_text_reads_back_as_the_value(value: Any) -> None:
    assert json.loads(dump_value({"x": value})) == {"x": value}


def test_dumped_non_finite_numbers_are_null() -> None:
    value = [math.nan, math.inf, {"a": -math.inf}]
    assert dump_value(value) == '[null,null,{"a":null}]'
    assert dump_value([2**70, *value]) == f'[{2**70},null,null,{{"a":null}}]'
    assert dump_value(["é", 2**70]) == f'["é",{2**70}]'
