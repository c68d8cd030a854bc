"""Templates: what they render, and that no template can take the machine down."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cbatch_cli.errors import RowError, RowErrorType, UsageError
from cbatch_cli.text.render_worker import CpuLimit, RenderLimits
from cbatch_cli.text.rendering import ChatRenderer, RowRenderer, describe_error
from cbatch_cli.text.templates import TemplateRenderer, read_template
from tests.tiny_tokenizers import CHAT_TEMPLATE, byte_tokenizer

LIMITS = RenderLimits(cpu_seconds=1.0, memory_bytes=256 * 2**20, output_bytes=2**20)
SECRET = "text of the prompt"

NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(s='x') %}"
    "{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
)
COSTLY = {
    "nested loops": NESTED_LOOPS,
    "one long C call": "{{ n ** n }}",
    "repeated string": "{{ 'x' * n }}",
    "constant that is folded when compiled": "{{ 'x' * 10 ** 10 }}",
    "constant power": "{{ 10 ** (10 ** 10) }}",
    "range": "{{ range(n) | list }}",
    "doubling": DOUBLING,
    "format": "{{ '%10000000000d' | format(n) }}",
    "str.format": "{{ '{:>10000000000}'.format(n) }}",
    "join": "{{ ([['a' * 1000] * 1000] * (n // 10 ** 7)) | map('join') | join }}",
    "padding": "{{ 'x'.ljust(n) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 10000) }}",
    "indent": "{{ [1] | tojson(indent=n) }}",
    "filler": "{{ lipsum(n=n) }}",
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{{ 'y' * 2000000 }}",
}


def worker_of(renderer: TemplateRenderer) -> psutil.Process:
    return psutil.Process(renderer._worker._process.pid)


def render(template: str, **columns: Any) -> str | RowError:
    with TemplateRenderer(row_template=template, limits=LIMITS) as renderer:
        return renderer.render_rows([columns])[0]


def failure(template: str, **columns: Any) -> str:
    """The message of the row error."""
    result = render(template, **columns)
    assert isinstance(result, RowError)
    assert result.type is RowErrorType.TEMPLATE_ERROR
    return result.message


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_fails_its_row_and_nothing_else(name: str) -> None:
    template = "{% if n %}" + COSTLY[name] + "{% else %}fine{% endif %}"
    try:
        renderer = TemplateRenderer(row_template=template, limits=LIMITS)
    except UsageError as error:
        assert name.startswith("constant")
        assert "--template" in str(error) or "CPU time" in str(error)
        return
    before = psutil.Process().memory_info().rss
    with renderer:
        first, costly, last = renderer.render_rows([{"n": 0}, {"n": 10**10}, {"n": 0}])
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert first == last == "fine"
    assert isinstance(costly, RowError)
    assert costly.type is RowErrorType.TEMPLATE_ERROR
    assert not costly.retryable


def test_limits_are_named() -> None:
    assert failure(NESTED_LOOPS) == "the template takes more than 1 s of CPU time"
    assert "memory" in failure("{{ 'x' * n }}", n=10**10)
    assert (
        failure("{{ 'y' * 2000000 }}") == "the template renders 2000000 bytes; the limit is 1048576"
    )


def test_a_chat_template_is_limited_too() -> None:
    template = "{% if messages[0].content == 'loop' %}" + NESTED_LOOPS + "{% endif %}ok"
    chats = [[{"role": "user", "content": text}] for text in ("a", "loop", "b")]
    with TemplateRenderer(chat_template=template, limits=LIMITS) as renderer:
        first, slow, last = renderer.render_chats(chats)
    assert first == last == "ok"
    assert slow == RowError(
        RowErrorType.TEMPLATE_ERROR, "the template takes more than 1 s of CPU time"
    )


def test_a_chat_template_that_always_loops_is_refused_at_start() -> None:
    with pytest.raises(UsageError, match="takes more than 1 s of CPU time to compile"):
        TemplateRenderer(chat_template=NESTED_LOOPS, limits=LIMITS)


def test_the_cpu_limit_is_set_and_lifted() -> None:
    with CpuLimit(300.0):
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] < 301
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert RenderLimits().cpu_seconds == 5.0


def test_columns_are_variables() -> None:
    template = "{{ a }}-{{ b.c[1] }}-{{ row['d e'] }}{% if f is none %}!{% endif %}"
    columns = {"a": 1, "b": {"c": [2, "ä"]}, "d e": "<&>", "f": None}
    assert render(template, **columns) == "1-ä-<&>!"
    assert render("{{ row }}", row="a column of that name") == "a column of that name"
    assert render("{{ a | tojson }}", a={"b": "<é>"}) == '{"b": "<é>"}'


def test_many_rows_come_back_in_order() -> None:
    texts = [str(i) * (i * 97 % 4000) for i in range(2000)] + ["x" * 900_000, "y" * 900_000, ""]
    with TemplateRenderer(row_template="{{ t }}", limits=LIMITS) as renderer:
        assert renderer.render_rows([{"t": text} for text in texts]) == texts
        assert renderer.render_rows([]) == []


def test_an_undefined_column_is_named() -> None:
    message = failure("{{ a }}\n{{ question }}", a=SECRET)
    assert message == "the template uses 'question', which this row does not have (line 2)"
    assert "'missing'" in failure("{{ a.missing }}", a={})


def test_a_null_column_is_named_and_never_printed() -> None:
    message = failure("{{ a }} {{ b }}", a="x", b=None)
    assert message == "the template prints a null value; null in this row: 'b'"
    assert render("{{ b or 'none given' }}", b=None) == "none given"


@pytest.mark.parametrize(
    "template",
    [
        "{{ {}[text] }}",
        "{{ text.format() }}",
        "{{ ({}).fromkeys(text).nope }}",
        "{{ '%d' | format(text) }}",
        "{{ [].index(text) }}",
        "{{ text.__class__ }}",
        "{{ text + 1 }}",
        "{% include text %}",
    ],
)
def test_errors_hold_no_text_of_the_row(template: str) -> None:
    message = failure(template, text="{" + SECRET + "}")
    assert SECRET not in message
    assert "line 1" in message


def test_what_a_chat_template_refuses_is_said_in_its_own_words() -> None:
    fixed = "{{ raise_exception('Roles must alternate') }}"
    quoting = "{{ raise_exception('Unknown: ' + messages[0].content) }}"
    messages = [{"role": "user", "content": SECRET}]
    for template, expected in (
        (fixed, "the template refuses the row: Roles must alternate (line 1)"),
        (quoting, "the template failed with TemplateError (line 1)"),
    ):
        renderer = ChatRenderer(template, {})
        with pytest.raises(Exception) as caught:
            renderer.render(messages)
        assert describe_error(caught.value, template) == expected


@pytest.mark.parametrize("template", ["{{ a", "{% for %}", "{{ a | no_such_filter }}", "{% x %}"])
def test_a_syntax_error_is_a_usage_error_at_start(template: str) -> None:
    with pytest.raises(UsageError, match="--template does not compile: line 2"):
        TemplateRenderer(row_template="first\n" + template)
    with pytest.raises(UsageError, match="chat template does not compile: line 2"):
        TemplateRenderer(chat_template="first\n" + template)


def test_the_sandbox_holds() -> None:
    assert "SecurityError" in failure("{{ ''.__class__.__mro__ }}")
    assert "SecurityError" in failure("{{ items.append(1) }}", items=[])
    assert render("{{ row.clear is defined }}") == "False"


def test_text_that_is_not_unicode_fails_its_row() -> None:
    message = "the template renders text that is not valid Unicode"
    assert failure("{{ a }}", a="\ud800") == message


def test_a_worker_that_is_killed_fails_one_row() -> None:
    with TemplateRenderer(row_template="{{ a }}", limits=LIMITS) as renderer:
        worker = worker_of(renderer)
        os.kill(worker.pid, signal.SIGKILL)
        lost, answered = renderer.render_rows([{"a": 1}, {"a": 2}])
        assert lost == RowError(
            RowErrorType.TEMPLATE_ERROR, "the template's process ended with status -9"
        )
        assert answered == "2"


def test_signals_to_the_group_are_for_the_parent() -> None:
    with TemplateRenderer(row_template="{{ a }}", limits=LIMITS) as renderer:
        worker = worker_of(renderer)
        assert os.getsid(worker.pid) != os.getsid(0)
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        assert renderer.render_rows([{"a": 1}]) == ["1"]


def test_close_ends_the_worker_and_so_does_dropping_the_renderer() -> None:
    renderer = TemplateRenderer(row_template="x")
    worker = worker_of(renderer)
    renderer.close()
    renderer.close()
    assert not worker.is_running()
    renderer = TemplateRenderer(row_template="x")
    worker = worker_of(renderer)
    del renderer
    assert not worker.is_running()


def test_the_worker_ends_when_its_parent_is_gone() -> None:
    with TemplateRenderer(row_template="x") as renderer:
        worker = worker_of(renderer)
        renderer._worker._stdin.close()
        assert worker.wait(timeout=30) == 0


def test_rendering_works_on_another_thread() -> None:
    results: list[str | RowError] = []
    with TemplateRenderer(row_template="{{ a }}") as renderer:
        thread = threading.Thread(target=lambda: results.extend(renderer.render_rows([{"a": "é"}])))
        thread.start()
        thread.join()
    assert results == ["é"]


@pytest.fixture(scope="module")
def chat() -> Iterator[TemplateRenderer]:
    tokenizer = byte_tokenizer()
    with TemplateRenderer(
        chat_template=CHAT_TEMPLATE, special_tokens=tokenizer.special_tokens_map
    ) as renderer:
        yield renderer


def test_chats_equal_apply_chat_template(chat: TemplateRenderer) -> None:
    chats = [
        [{"role": "user", "content": "héllo"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "<|end|>", "name": "n"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}],
    ]
    tokenizer = byte_tokenizer()
    expected = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in chats
    ]
    assert chat.render_chats(chats) == expected


def test_parts_are_joined_for_a_template_that_takes_strings(chat: TemplateRenderer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    in_parts, in_text = chat.render_chats(
        [[{"role": "user", "content": parts}], [{"role": "user", "content": "a\nb"}]]
    )
    assert in_parts == in_text


def test_parts_reach_a_template_that_takes_them() -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatRenderer(template, {}).render([{"role": "user", "content": parts}]) == "[a][b]"


def test_a_row_renderer_needs_no_process() -> None:
    assert RowRenderer("{{ a }}\n").render({"a": 1}) == "1"


def test_read_template(tmp_path: Path) -> None:
    assert read_template("{{ a }}") == "{{ a }}"
    file = tmp_path / "prompt.jinja"
    file.write_bytes("\ufeff{{ ä }}\r\n".encode())
    assert read_template(f"@{file}") == "{{ ä }}\n"
    with pytest.raises(UsageError, match="nowhere"):
        read_template(f"@{tmp_path}/nowhere")
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"prompt\.jinja"):
        read_template(f"@{file}")
