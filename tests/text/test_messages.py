"""Conversations in rows: which are taken, which are refused, and in what words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbatch_cli.errors import RowErrorType, RowFailedError
from cbatch_cli.text.messages import parse_messages, user_message, with_system

USER = {"role": "user", "content": "hi"}


def failure(value: Any) -> tuple[RowErrorType, str]:
    with pytest.raises(RowFailedError) as caught:
        parse_messages(value, "chat")
    return caught.value.error.type, caught.value.error.message


@pytest.mark.parametrize("value", [[USER], (USER,), json.dumps([USER]), [{**USER, "name": None}]])
def test_messages_come_as_lists_or_as_json_text(value: Any) -> None:
    assert parse_messages(value, "chat") == [USER]


def test_other_keys_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 12345678901234567890123}]}
    answer = {"role": "tool", "content": "", "tool_call_id": "x"}
    parsed = parse_messages(json.dumps([call, answer]), "chat")
    assert parsed == [{"role": "assistant", "tool_calls": call["tool_calls"]}, answer]


def test_text_parts_are_kept_as_parts() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}, {"text": "b"}]
    (message,) = parse_messages([{"role": "user", "content": parts}], "chat")
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, "'chat' must be a list of messages, not a number"),
        (True, "'chat' must be a list of messages, not a boolean"),
        (USER, "'chat' must be a list of messages, not an object"),
        (b"[]", "'chat' must be a list of messages, not bytes"),
        ("{", "'chat' is a string that is not JSON"),
        ("[" * 100_000, "'chat' is a string that is not JSON"),
        ('"text"', "'chat' must be a list of messages, not a string"),
        (["hi"], "chat[0] must be an object, not a string"),
        ([USER, {"content": "x"}], "chat[1].role must be a non-empty string"),
        ([{"role": "", "content": "x"}], "chat[0].role must be a non-empty string"),
        ([{"role": 1, "content": "x"}], "chat[0].role must be a non-empty string"),
        ([{"role": "user"}], "chat[0] has no content"),
        ([{"role": "user", "content": None, "name": "n"}], "chat[0] has no content"),
        ([{"role": "user", "content": 3}], "chat[0].content must be a string, not a number"),
        (
            [{"role": "user", "content": ["x"]}],
            "chat[0].content[0] must be an object, not a string",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "chat[0].content[0].text must be a string, not null",
        ),
    ],
)
def test_wrong_types(value: Any, expected: str) -> None:
    assert failure(value) == (RowErrorType.BAD_TYPE, expected)


@pytest.mark.parametrize(
    "value",
    [[], "[]", [{"role": "user", "content": ""}], [{"role": "user", "content": [{"text": ""}]}]],
)
def test_empty_conversations(value: Any) -> None:
    assert failure(value)[0] is RowErrorType.EMPTY_PROMPT


def test_parts_that_are_not_text_are_not_dropped_in_silence() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:secret"}}
    assert failure([{"role": "user", "content": [part]}]) == (
        RowErrorType.UNSUPPORTED_OPTION,
        "chat[0].content[0] is not a text part; others are not supported",
    )


def test_a_system_message_goes_before_a_chat_that_has_none() -> None:
    assert with_system(user_message("hi"), "be brief") == [
        {"role": "system", "content": "be brief"},
        USER,
    ]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "x"}, USER]
        assert with_system(own, "be brief") == own
    assert with_system([USER], None) == with_system([USER], "") == [USER]
