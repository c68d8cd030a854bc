from __future__ import annotations

from typing import Any

import pytest

from cbatch_cli.data.prompt_columns import PromptColumns, choose_prompt_columns
from cbatch_cli.errors import UsageError


def choose(*names: str, **options: Any) -> PromptColumns:
    defaults: dict[str, Any] = {
        "prompt_column": None,
        "messages_column": None,
        "has_template": False,
        "is_openai": False,
    }
    return choose_prompt_columns(names, **(defaults | options))


def test_order_when_nothing_is_named() -> None:
    names = ["question", "input", "instruction", "text", "prompt", "messages"]
    expected = {
        "messages": PromptColumns("messages", "messages"),
        "prompt": PromptColumns("text", "prompt"),
        "text": PromptColumns("text", "text"),
        "instruction": PromptColumns("instruction", "instruction", "input"),
        "question": PromptColumns("text", "question"),
    }
    for name, chosen in expected.items():
        assert choose("id", *names) == chosen
        names.remove(name)


def test_instruction_stands_alone_without_input() -> None:
    assert choose("instruction", "output") == PromptColumns("instruction", "instruction", None)


def test_what_is_named_wins() -> None:
    assert choose("prompt", "body", prompt_column="body") == PromptColumns("text", "body")
    assert choose("prompt", "chat", messages_column="chat") == PromptColumns("messages", "chat")
    assert choose("messages", has_template=True) == PromptColumns("template")
    assert choose("custom_id", "body", is_openai=True) == PromptColumns("openai")
    assert choose("body", prompt_column="body", is_openai=True).kind == "text"


@pytest.mark.parametrize("option", ["prompt_column", "messages_column"])
def test_a_named_column_must_be_there(option: str) -> None:
    with pytest.raises(UsageError, match="'a', 'Prompt'.*did you mean 'Prompt'"):
        choose("a", "Prompt", **{option: "prompt"})


def test_names_that_differ_in_case_are_other_columns() -> None:
    assert choose("Prompt", "question") == PromptColumns("text", "question")
    assert choose("Prompt", "prompt") == PromptColumns("text", "prompt")


def test_none_to_choose_names_the_columns_found() -> None:
    with pytest.raises(UsageError, match="the columns found are 'Prompt', 'x'; choose with"):
        choose("Prompt", "x")
    with pytest.raises(UsageError, match="and 60 more"):
        choose(*[f"c{i}" for i in range(100)])


def test_an_input_without_columns_takes_any_name_but_must_be_told_one() -> None:
    assert choose(prompt_column="x") == PromptColumns("text", "x")
    with pytest.raises(UsageError, match="no readable row"):
        choose()


def test_columns_read() -> None:
    assert PromptColumns("template").columns_read is None
    assert PromptColumns("text", "a").columns_read == {"a", "sampling_params"}
    assert PromptColumns("instruction", "a", "b").columns_read == {"a", "b", "sampling_params"}
    openai = PromptColumns("openai").columns_read
    assert openai is not None
    assert openai >= {"custom_id", "method", "url", "body"}


def test_text_columns() -> None:
    assert PromptColumns("text", "a").text_columns == {"a"}
    assert PromptColumns("instruction", "a", "b").text_columns == {"a", "b"}
    assert PromptColumns("messages", "a").text_columns == set()
