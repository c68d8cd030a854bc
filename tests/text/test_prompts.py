"""Rows to token ids, against what transformers makes of the same prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cbatch_cli.data.prompt_columns import PromptColumns, PromptKind
from cbatch_cli.data.row import Row
from cbatch_cli.errors import RowError, RowErrorType, UsageError
from cbatch_cli.request import SamplingParams
from cbatch_cli.text.prompts import EncodedPrompt, PromptEncoder
from tests.tiny_tokenizers import all_tokenizers, byte_tokenizer

TOKENIZERS = all_tokenizers()
BYTES = TOKENIZERS["byte"]
DEFAULTS = SamplingParams(max_tokens=7, stop=("END",))
COLUMNS: dict[PromptKind, PromptColumns] = {
    "text": PromptColumns("text", "prompt"),
    "messages": PromptColumns("messages", "messages"),
    "instruction": PromptColumns("instruction", "instruction", "input"),
    "template": PromptColumns("template"),
    "openai": PromptColumns("openai"),
}
SECRET = "what the prompt says"


@contextlib.contextmanager
def encoder(
    kind: PromptKind, tokenizer: PreTrainedTokenizerBase = BYTES, **options: Any
) -> Iterator[PromptEncoder]:
    options.setdefault("defaults", DEFAULTS)
    prompts = PromptEncoder(tokenizer=tokenizer, prompt=COLUMNS[kind], **options)
    with contextlib.closing(prompts):
        yield prompts


def encode(
    kind: PromptKind, *rows: Mapping[str, Any], **options: Any
) -> list[EncodedPrompt | RowError]:
    with encoder(kind, **options) as prompts:
        return prompts.encode([Row(index, dict(columns)) for index, columns in enumerate(rows)])


def text_of(prompt: EncodedPrompt | RowError) -> str:
    assert isinstance(prompt, EncodedPrompt)
    return str(BYTES.decode(prompt.token_ids))


def error_of(prompt: EncodedPrompt | RowError) -> RowErrorType:
    assert isinstance(prompt, RowError)
    assert SECRET not in prompt.message
    return prompt.type


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5))
def test_ids_are_those_of_the_tokenizer(name: str, texts: list[str]) -> None:
    rows = [Row(index, {"prompt": text}) for index, text in enumerate(texts)]
    with encoder("text", TOKENIZERS[name]) as prompts:
        encoded = prompts.encode(rows)
    assert encoded == [
        EncodedPrompt(token_ids=tuple(TOKENIZERS[name](text)["input_ids"]), params=DEFAULTS)
        for text in texts
    ]


@pytest.mark.parametrize("name", ["byte", "llama"])
def test_chat_ids_are_those_of_apply_chat_template(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    chats = [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "日本<|end|></s>"}],
    ]
    encoded = encode("messages", *({"messages": chat} for chat in chats), tokenizer=tokenizer)
    for prompt, chat in zip(encoded, chats, strict=True):
        assert isinstance(prompt, EncodedPrompt)
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert prompt.token_ids == tuple(ids)
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_bad_row_never_spoils_its_neighbours() -> None:
    values = ["a", None, "b", 5, "", ["x"], "\ud800", " ", float("nan"), {"a": SECRET}]
    rows: list[dict[str, Any]] = [{"prompt": value} for value in values]
    encoded = encode("text", *rows, {})
    good = [text_of(prompt) for prompt in encoded if isinstance(prompt, EncodedPrompt)]
    assert good == ["<s>a", "<s>b", "<s> "]  # white space is a prompt
    assert [error_of(prompt) for prompt in encoded if isinstance(prompt, RowError)] == [
        RowErrorType.MISSING_PROMPT,
        RowErrorType.BAD_TYPE,
        RowErrorType.EMPTY_PROMPT,
        RowErrorType.BAD_TYPE,
        RowErrorType.BAD_TYPE,
        RowErrorType.BAD_TYPE,
        RowErrorType.BAD_TYPE,
        RowErrorType.MISSING_PROMPT,
    ]


def test_a_row_that_could_not_be_read_keeps_its_error() -> None:
    error = RowError(RowErrorType.INVALID_JSON, "x")
    with encoder("text") as prompts:
        assert prompts.encode([Row(0, error=error)]) == [error]
        assert prompts.encode([]) == []


def test_instruction_and_input_are_joined() -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "Sum", "input": "1 2"},
        {"instruction": "Go", "input": ""},
        {"instruction": "Go", "input": None},
        {"instruction": "Go"},
    ]
    encoded = encode("instruction", *rows)
    assert [text_of(prompt) for prompt in encoded] == ["<s>Sum\n\n1 2", *["<s>Go"] * 3]
    wrong_input, empty, missing = encode(
        "instruction", {"instruction": "a", "input": 3}, {"instruction": ""}, {"input": SECRET}
    )
    assert error_of(wrong_input) is RowErrorType.BAD_TYPE
    assert error_of(empty) is RowErrorType.EMPTY_PROMPT
    assert error_of(missing) is RowErrorType.MISSING_PROMPT


def test_a_template_makes_the_prompt() -> None:
    good, undefined, empty = encode(
        "template",
        {"q": "why", "sampling_params": {"max_tokens": 3}},
        {"other": SECRET},
        {"q": ""},
        template="{{ q }}",
    )
    assert text_of(good) == "<s>why"
    assert isinstance(good, EncodedPrompt)
    assert good.params.max_tokens == 3
    assert error_of(undefined) is RowErrorType.TEMPLATE_ERROR
    assert isinstance(undefined, RowError)
    assert "'q'" in undefined.message
    assert error_of(empty) is RowErrorType.EMPTY_PROMPT


def test_a_template_that_does_not_compile_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--template"), encoder("template", template="{{"):
        pass


def test_chat_wraps_a_plain_prompt() -> None:
    (plain,) = encode("text", {"prompt": "hi"}, chat=True, system="be brief")
    (templated,) = encode("template", {"q": "hi"}, template="{{ q }}", chat=True, system="be brief")
    expected = "<s><|start|>system\nbe brief<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert text_of(plain) == text_of(templated) == expected
    (empty,) = encode("text", {"prompt": ""}, chat=True)
    assert error_of(empty) is RowErrorType.EMPTY_PROMPT


def test_the_system_text_goes_before_a_plain_prompt() -> None:
    (prompt,) = encode("text", {"prompt": "hi"}, system="be brief")
    assert text_of(prompt) == "<s>be brief\n\nhi"
    (prompt,) = encode("text", {"prompt": "hi"}, system="")
    assert text_of(prompt) == "<s>hi"


def test_bad_conversations_fail_their_rows() -> None:
    good = {"messages": [{"role": "user", "content": "hi"}]}
    encoded = encode("messages", {"messages": None}, {"messages": SECRET}, good, {"messages": []})
    missing, wrong, answered, empty = encoded
    assert error_of(missing) is RowErrorType.MISSING_PROMPT
    assert error_of(wrong) is RowErrorType.BAD_TYPE
    assert text_of(answered).endswith("hi<|end|>\n<|start|>assistant\n")
    assert error_of(empty) is RowErrorType.EMPTY_PROMPT


def test_conversations_need_a_chat_template_and_chat() -> None:
    bare = byte_tokenizer(chat_template=None)
    bare.name_or_path = "some/model"
    for kind, chat in (("messages", None), ("messages", True), ("text", True)):
        with pytest.raises(UsageError, match="the model has no chat template"):
            PromptEncoder(tokenizer=bare, prompt=COLUMNS[kind], chat=chat, defaults=DEFAULTS)
    with pytest.raises(UsageError, match="'messages'.*--no-chat"):
        PromptEncoder(tokenizer=BYTES, prompt=COLUMNS["messages"], chat=False, defaults=DEFAULTS)


def test_several_chat_templates_need_a_default() -> None:
    tokenizer = byte_tokenizer(chat_template=None)
    tokenizer.chat_template = {"rag": "r", "tool_use": "t"}
    with pytest.raises(UsageError, match="rag"), encoder("messages", tokenizer):
        pass
    tokenizer.chat_template = {"default": "d{{ messages[0].content }}", "tool_use": "t"}
    messages = [{"role": "user", "content": "hi"}]
    (prompt,) = encode("messages", {"messages": messages}, tokenizer=tokenizer)
    assert text_of(prompt) == "dhi"


def openai_line(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "1", "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_openai_lines_are_chats_or_completions() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        openai_line("/v1/chat/completions", messages=messages, temperature=0.5),
        openai_line("/v1/completions", prompt="hi", max_tokens=3),
        openai_line("/v1/completions", prompt="", max_tokens=3),
        openai_line("/v1/chat/completions", messages=[{"role": "user"}]),
        openai_line("/v1/embeddings", input=SECRET),
    ]
    chat, completion, empty, wrong, unknown = encode("openai", *rows)
    assert text_of(chat) == "<s><|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert isinstance(chat, EncodedPrompt)
    assert chat.params.temperature == 0.5
    assert text_of(completion) == "<s>hi"
    assert isinstance(completion, EncodedPrompt)
    assert completion.params.max_tokens == 3
    assert error_of(empty) is RowErrorType.EMPTY_PROMPT
    assert error_of(wrong) is RowErrorType.BAD_TYPE
    assert error_of(unknown) is RowErrorType.UNSUPPORTED_OPTION


@pytest.mark.parametrize("without_template", [True, False])
def test_openai_chats_that_cannot_be_fail_their_rows(without_template: bool) -> None:
    tokenizer = byte_tokenizer(chat_template=None) if without_template else BYTES
    chat, completion = encode(
        "openai",
        openai_line("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        openai_line("/v1/completions", prompt="hi"),
        tokenizer=tokenizer,
        chat=None if without_template else False,
    )
    assert error_of(chat) is RowErrorType.UNSUPPORTED_OPTION
    assert text_of(completion) == "<s>hi"


def test_a_row_overrides_the_sampling_defaults() -> None:
    own: list[Any] = [
        {"temperature": 0.5, "stop": None},
        '{"max_tokens": 2}',
        None,
        " ",
        '{"max',
        [1],
        {"temperature": -1},
        {"tempature": 1},
        {"top_k": 10**20},
        {"top_k": 10**5000},
        {"max_tokens": 2**31},
        {"stop_token_ids": [2**70]},
    ]
    encoded = encode("text", *({"prompt": "a", "sampling_params": value} for value in own))
    params = [prompt.params for prompt in encoded if isinstance(prompt, EncodedPrompt)]
    assert params == [
        SamplingParams(max_tokens=7, stop=("END",), temperature=0.5),
        SamplingParams(max_tokens=2, stop=("END",)),
        DEFAULTS,
        DEFAULTS,
    ]
    assert [error_of(prompt) for prompt in encoded[4:]] == [
        RowErrorType.INVALID_OPTION,
        RowErrorType.INVALID_OPTION,
        RowErrorType.INVALID_OPTION,
        RowErrorType.UNSUPPORTED_OPTION,
        *[RowErrorType.INVALID_OPTION] * 4,
    ]


def test_a_stop_string_that_is_a_special_token_stops_by_its_id() -> None:
    end_id = BYTES.convert_tokens_to_ids("<|end|>")
    (prompt,) = encode(
        "text",
        {"prompt": "a", "sampling_params": {"stop": ["x", "<|end|>"], "stop_token_ids": [5]}},
    )
    assert isinstance(prompt, EncodedPrompt)
    assert prompt.params.stop == ("x", "<|end|>")
    assert prompt.params.stop_token_ids == (5, end_id)


def test_prompts_too_long_are_refused_by_tokens_and_by_characters() -> None:
    limits = {"max_model_len": 8, "kv_capacity_tokens": 6}
    texts = ["abcd", "abcde", "a" * 7, "a" * 100_000]
    fits, pool, context, huge = encode("text", *({"prompt": t} for t in texts), **limits)
    assert text_of(fits) == "<s>abcd"
    messages = []
    for error in (pool, context, huge):
        assert error_of(error) is RowErrorType.PROMPT_TOO_LONG
        assert isinstance(error, RowError)
        messages.append(error.message)
    assert "6 tokens" in messages[0] and "KV cache of 6" in messages[0]
    assert "8 tokens" in messages[1] and "context of 8" in messages[1]
    assert "at least" in messages[2]


class StubbornTokenizer:
    """Fails on a batch that holds `poison`, as Rust code may."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTES, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        if "poison" in texts:
            raise self.error
        return BYTES(texts, **options)


class PanicException(BaseException):
    """Rust panics come as a `BaseException` of this name."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PanicException(SECRET), RowErrorType.BAD_TYPE),
        (ValueError(SECRET), RowErrorType.BAD_TYPE),
        (MemoryError(), RowErrorType.OUT_OF_MEMORY),
    ],
)
def test_a_prompt_that_breaks_the_tokenizer_fails_alone(
    error: BaseException, expected: RowErrorType
) -> None:
    tokenizer: Any = StubbornTokenizer(error)
    first, poison, last = encode(
        "text", {"prompt": "a"}, {"prompt": "poison"}, {"prompt": "b"}, tokenizer=tokenizer
    )
    assert (text_of(first), text_of(last)) == ("<s>a", "<s>b")
    assert error_of(poison) is expected


def test_an_interrupt_is_no_bad_row() -> None:
    tokenizer: Any = StubbornTokenizer(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        encode("text", {"prompt": "poison"}, tokenizer=tokenizer)


def test_a_batch_is_one_call() -> None:
    calls = []

    class Counting(StubbornTokenizer):
        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.append(len(texts))
            return super().__call__(texts, **options)

    tokenizer: Any = Counting(ValueError())
    encode("text", *({"prompt": "a"} for _ in range(50)), {"prompt": ""}, tokenizer=tokenizer)
    assert calls == [50]


def test_a_prompt_without_tokens_is_empty() -> None:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    tokenizer.backend_tokenizer.post_processor = None
    (prompt,) = encode("text", {"prompt": "  "}, tokenizer=tokenizer)
    assert error_of(prompt) is RowErrorType.EMPTY_PROMPT
