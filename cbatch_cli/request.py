"""What is asked of the engine and what comes back. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from cbatch_cli.errors import RowError, RowErrorType, RowFailedError
from cbatch_cli.metrics import RequestMetrics

MAX_INT = 2**31 - 1
"""The largest count or token id that may be asked for."""


class FinishReason(StrEnum):
    """Why a sequence ended; the value is what the output column holds."""

    STOP = "stop"
    LENGTH = "length"
    STOP_SEQUENCE = "stop_sequence"
    REPETITION = "repetition"
    ERROR = "error"
    CANCELLED = "cancelled"


class RequestKey(NamedTuple):
    """Identity of one generation: the input row and which of its samples."""

    row: int
    sample: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one row is decoded. `temperature` 0 means greedy.

    Filters apply in the order temperature, top_k, top_p, min_p, as in transformers.
    `seed` replaces the run's seed for this row. Raises `ValueError` naming field, value and range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_int("top_k", self.top_k, 0, MAX_INT)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_int("max_tokens", self.max_tokens, 1, MAX_INT)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError("stop must be a list of non-empty strings")
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0, MAX_INT)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**64 - 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the most probable one."""
        return self.temperature == 0.0

    def override(self, fields: Mapping[str, Any]) -> SamplingParams:
        """A copy with a row's own fields in place of these; a null field keeps the default.

        Raises `RowFailedError`: `unsupported_option` for a name we do not know,
        `invalid_option` for a value out of range or of a wrong type.
        """
        changes: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None:
                continue
            if name not in SAMPLING_FIELDS:
                raise RowFailedError(
                    RowErrorType.UNSUPPORTED_OPTION, f"sampling option {name!r} is not supported"
                )
            if name == "stop" and isinstance(value, str):
                value = (value,)
            elif name in ("stop", "stop_token_ids"):
                if not isinstance(value, list | tuple):
                    raise RowFailedError(RowErrorType.INVALID_OPTION, f"{name} must be a list")
                value = tuple(value)
            changes[name] = value
        # A row that asks for fewer tokens than the run's min_tokens did not ask for an error.
        if "max_tokens" in changes and "min_tokens" not in changes and self.min_tokens:
            max_tokens = changes["max_tokens"]
            if isinstance(max_tokens, int) and max_tokens > 0:
                changes["min_tokens"] = min(self.min_tokens, max_tokens)
        try:
            return dataclasses.replace(self, **changes)
        except (ValueError, TypeError) as error:
            raise RowFailedError(RowErrorType.INVALID_OPTION, str(error)) from None


SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One generation asked for: token ids in, `params` applied."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    resumed_token_ids: tuple[int, ...] = ()
    """Output ids that an interrupted run has made: prefilled, not decoded again."""
    attempt: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """One generation finished. `token_ids` are the output ids, EOS included.

    `text` is filled where a detokenizer is at hand: the engine itself sees ids only.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: RowError | None = None
    text: str | None = None


def check_stop_token_ids(params: SamplingParams, vocab_size: int) -> RowError | None:
    """An error if `params` name an id that the model cannot give."""
    last_id = max(params.stop_token_ids, default=0)
    if last_id < vocab_size:
        return None
    message = f"stop_token_ids holds {last_id}, but the model has {vocab_size} tokens"
    return RowError(RowErrorType.INVALID_OPTION, message)


def check_length(
    num_prompt_tokens: int,
    max_model_len: int,
    kv_capacity_tokens: int,
    *,
    is_lower_bound: bool = False,
) -> RowError | None:
    """An error with the two numbers if the prompt leaves no room for one token more.

    `max_model_len` is the model's context and `kv_capacity_tokens` the whole KV pool, in tokens.
    `is_lower_bound` says that the prompt may have more tokens than `num_prompt_tokens`.
    """
    if num_prompt_tokens + 1 > max_model_len:
        limit = f"the context of {max_model_len}"
    elif num_prompt_tokens + 1 > kv_capacity_tokens:
        limit = f"the KV cache of {kv_capacity_tokens}"
    else:
        return None
    shown = f"at least {num_prompt_tokens}" if is_lower_bound else str(num_prompt_tokens)
    message = f"the prompt has {shown} tokens; with 1 to generate that exceeds {limit}"
    return RowError(RowErrorType.PROMPT_TOO_LONG, message)


def _require_number(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low or value > high:
        raise ValueError(f"{name} must be {_range(low, high, low_open)}, not {value!r:.40}")
    if low_open and value == low:
        raise ValueError(f"{name} must be {_range(low, high, low_open)}, not {value!r:.40}")


def _require_int(name: str, value: Any, low: int, high: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        # Numbers of more digits than Python turns into text come out as their type.
        shown = f"{value!r:.40}" if not is_int or abs(value) < 2**128 else "a larger one"
        raise ValueError(
            f"{name} must be an integer at least {low} and at most {high}, not {shown}"
        )


def _range(low: float, high: float, low_open: bool) -> str:
    lower = f"above {low:g}" if low_open else f"at least {low:g}"
    return lower if math.isinf(high) else f"{lower} and at most {high:g}"
