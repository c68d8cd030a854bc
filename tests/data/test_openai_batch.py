from __future__ import annotations

from typing import Any

import pytest

from cbatch_cli.data.openai_batch import (
    CHAT_URL,
    COMPLETIONS_URL,
    OpenAIRequest,
    looks_like_batch_line,
    read_batch_line,
)
from cbatch_cli.errors import RowErrorType, RowFailedError

HELLO = [{"role": "user", "content": "secret"}]


def line(url: str = COMPLETIONS_URL, **body: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if url == CHAT_URL else {"prompt": "secret"}
    return {"custom_id": "1", "method": "POST", "url": url, "body": prompt | body}


def failure(columns: dict[str, Any]) -> tuple[RowErrorType, str]:
    with pytest.raises(RowFailedError) as caught:
        read_batch_line(columns)
    assert "secret" not in caught.value.error.message
    return caught.value.error.type, caught.value.error.message


def test_completion_and_chat() -> None:
    assert read_batch_line(line()) == OpenAIRequest(prompt="secret", sampling={})
    assert read_batch_line(line(CHAT_URL)) == OpenAIRequest(messages=HELLO, sampling={})


def test_sampling_options_come_through_as_they_are() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop": ["a"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "seed": 7,
        "max_tokens": 9,
    }
    assert read_batch_line(line(model="m", **options)).sampling == options
    assert read_batch_line(line(CHAT_URL, stop="x")).sampling == {"stop": "x"}
    # Ranges are checked where all sampling options are.
    assert read_batch_line(line(temperature=-1, max_tokens=0)).sampling == {
        "temperature": -1,
        "max_tokens": 0,
    }


def test_both_names_of_max_tokens() -> None:
    assert read_batch_line(line(max_completion_tokens=3)).sampling == {"max_tokens": 3}
    both = line(CHAT_URL, max_completion_tokens=3, max_tokens=3)
    assert read_batch_line(both).sampling == {"max_tokens": 3}
    kind, message = failure(line(CHAT_URL, max_completion_tokens=3, max_tokens=4))
    assert kind is RowErrorType.INVALID_OPTION
    assert "max_completion_tokens" in message


def test_no_limit_of_top_k() -> None:
    assert read_batch_line(line(top_k=-1)).sampling == {"top_k": 0}


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1},
        {"best_of": 1},
        {"stream": False},
        {"echo": False},
        {"logprobs": False},
        {"logprobs": 0},
        {"top_logprobs": 0},
        {"presence_penalty": 0},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.0},
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"functions": None},
        {"n": None, "unknown": None},
    ],
)
def test_options_that_ask_for_nothing_are_accepted(body: dict[str, Any]) -> None:
    assert read_batch_line(line(**body)).sampling == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("n", "1"),
        ("best_of", 3),
        ("stream", True),
        ("stream", 0),
        ("echo", True),
        ("logprobs", True),
        ("logprobs", 5),
        ("presence_penalty", 0.5),
        ("frequency_penalty", False),
        ("logit_bias", {"1": 2}),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("temprature", 1),
        ("reasoning_effort", "low"),
        ("messages", HELLO),
    ],
)
def test_what_is_not_supported_is_named(name: str, value: Any) -> None:
    kind, message = failure(line(**{name: value}))
    assert kind is RowErrorType.UNSUPPORTED_OPTION
    assert repr(name) in message


def test_a_prompt_in_a_chat_body_is_not_supported() -> None:
    assert failure(line(CHAT_URL, prompt="secret"))[0] is RowErrorType.UNSUPPORTED_OPTION


@pytest.mark.parametrize("url", ["/v1/unknown", "/v1/embeddings", "", None, 3, ["/v1/completions"]])
def test_other_urls(url: Any) -> None:
    kind, message = failure(line() | {"url": url})
    assert kind is RowErrorType.UNSUPPORTED_OPTION
    assert "url" in message


def test_other_methods() -> None:
    assert failure(line() | {"method": "GET"})[0] is RowErrorType.UNSUPPORTED_OPTION
    assert failure(line() | {"method": 5})[0] is RowErrorType.UNSUPPORTED_OPTION
    assert read_batch_line(line() | {"method": None}).prompt == "secret"


def test_a_list_of_one_prompt() -> None:
    assert read_batch_line(line(prompt=["x"])).prompt == "x"


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (None, RowErrorType.MISSING_PROMPT),
        ([None], RowErrorType.MISSING_PROMPT),
        ([], RowErrorType.EMPTY_PROMPT),
        ([1, 2, 3], RowErrorType.UNSUPPORTED_OPTION),
        ([[1, 2]], RowErrorType.UNSUPPORTED_OPTION),
        (["a", "b"], RowErrorType.UNSUPPORTED_OPTION),
        (3, RowErrorType.BAD_TYPE),
        ([{}], RowErrorType.BAD_TYPE),
        ({"text": "secret"}, RowErrorType.BAD_TYPE),
    ],
)
def test_prompts_that_cannot_be_run(prompt: Any, kind: RowErrorType) -> None:
    assert failure(line(prompt=prompt))[0] is kind


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (None, RowErrorType.MISSING_PROMPT),
        ([], RowErrorType.EMPTY_PROMPT),
        ("secret", RowErrorType.BAD_TYPE),
        ({"role": "user"}, RowErrorType.BAD_TYPE),
    ],
)
def test_messages_that_cannot_be_run(messages: Any, kind: RowErrorType) -> None:
    assert failure(line(CHAT_URL, messages=messages))[0] is kind


def test_body_and_model() -> None:
    assert failure(line() | {"body": None})[0] is RowErrorType.MISSING_PROMPT
    assert failure(line() | {"body": "secret"})[0] is RowErrorType.BAD_TYPE
    assert failure(line(model=3))[0] is RowErrorType.BAD_TYPE


def test_recognition() -> None:
    assert looks_like_batch_line(line())
    assert not looks_like_batch_line(line() | {"body": "x"})
    without_url = line()
    del without_url["url"]
    assert not looks_like_batch_line(without_url)
