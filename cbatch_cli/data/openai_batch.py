"""OpenAI batch lines: what a request body asks of us, and a refusal of what we do not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbatch_cli.data.prompt_columns import OPENAI_COLUMNS
from cbatch_cli.errors import RowErrorType, RowFailedError

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

SAMPLING_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
)
"""Body fields that are sampling options of ours under the same name."""

MAX_TOKENS_OPTIONS = ("max_completion_tokens", "max_tokens")

LABELS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Body fields that name or file a request and do not touch its answer."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
"""Options we do not have, with the values that ask for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIRequest:
    """What one batch line asks: either `prompt` or `messages`, and sampling options by our names.

    Neither the messages nor the values of options have been checked.
    """

    prompt: str | None = None
    messages: list[Any] | None = None
    sampling: dict[str, Any]


def looks_like_batch_line(columns: Mapping[str, Any]) -> bool:
    """Whether a row has the keys of a batch line."""
    return all(name in columns for name in OPENAI_COLUMNS) and isinstance(columns["body"], dict)


def read_batch_line(columns: Mapping[str, Any]) -> OpenAIRequest:
    """The request in the columns of a row.

    Raises `RowFailedError`: `unsupported_option` naming the first thing asked that we do not do,
    `invalid_option` for contradictory limits, `missing_prompt`, `empty_prompt` or `bad_type`.
    """
    method = columns.get("method")
    if method not in (None, "POST"):
        raise _unsupported("the method of a batch line must be POST")
    url = columns.get("url")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise _unsupported(f"the url of a batch line must be {COMPLETIONS_URL} or {CHAT_URL}")
    body = columns.get("body")
    if body is None:
        raise RowFailedError(RowErrorType.MISSING_PROMPT, "the line has no body")
    if not isinstance(body, dict):
        raise RowFailedError(RowErrorType.BAD_TYPE, "body must be an object")
    if url == CHAT_URL:
        return OpenAIRequest(messages=_messages(body), sampling=_sampling(body, "messages"))
    return OpenAIRequest(prompt=_prompt(body), sampling=_sampling(body, "prompt"))


def _sampling(body: Mapping[str, Any], prompt_field: str) -> dict[str, Any]:
    sampling = {}
    for name, value in body.items():
        if value is None or name in (prompt_field, *MAX_TOKENS_OPTIONS) or name in LABELS:
            continue
        if name == "model":
            if not isinstance(value, str):
                raise RowFailedError(RowErrorType.BAD_TYPE, "model must be a string")
        elif name in SAMPLING_OPTIONS:
            sampling[name] = value
        elif not any(_same(value, neutral) for neutral in NEUTRAL_VALUES.get(name, ())):
            if name in NEUTRAL_VALUES:
                raise _unsupported(f"the value of {name!r} is not supported")
            raise _unsupported(f"the option {name!r} is not supported")
    limits = [body[name] for name in MAX_TOKENS_OPTIONS if body.get(name) is not None]
    if limits:
        if limits[0] != limits[-1]:
            names = " and ".join(MAX_TOKENS_OPTIONS)
            raise RowFailedError(RowErrorType.INVALID_OPTION, f"{names} differ")
        sampling["max_tokens"] = limits[0]
    # Servers with a top_k take -1 for no limit, which is 0 here.
    if _same(sampling.get("top_k"), -1):
        sampling["top_k"] = 0
    return sampling


def _prompt(body: Mapping[str, Any]) -> str:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if not prompt:
            raise RowFailedError(RowErrorType.EMPTY_PROMPT, "prompt is an empty list")
        if isinstance(prompt[0], int | list):
            raise _unsupported("a prompt of token ids is not supported")
        if len(prompt) > 1:
            raise _unsupported("several prompts in one line are not supported")
        prompt = prompt[0]
    if prompt is None:
        raise RowFailedError(RowErrorType.MISSING_PROMPT, "the body has no prompt")
    if not isinstance(prompt, str):
        raise RowFailedError(RowErrorType.BAD_TYPE, "prompt must be a string")
    return prompt


def _messages(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if messages is None:
        raise RowFailedError(RowErrorType.MISSING_PROMPT, "the body has no messages")
    if not isinstance(messages, list):
        raise RowFailedError(RowErrorType.BAD_TYPE, "messages must be a list")
    if not messages:
        raise RowFailedError(RowErrorType.EMPTY_PROMPT, "messages is an empty list")
    return messages


def _same(value: Any, other: Any) -> bool:
    """Equality under which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _unsupported(message: str) -> RowFailedError:
    return RowFailedError(RowErrorType.UNSUPPORTED_OPTION, message)
