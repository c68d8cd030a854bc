"""`Engine` as a program uses it: left early, called again, given what cannot be run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cbatch_cli.api import Engine
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from cbatch_cli.errors import EngineError, RowErrorType
from cbatch_cli.request import Request, RequestKey, RequestOutput, SamplingParams
from tests.null_engine import NullRunner, load_null_engine, null_answer

THREE = SamplingParams(max_tokens=3)


def make_engine(runner: Any = None) -> Engine:
    return Engine(load_null_engine("null", EngineConfig(), runner=runner))


def answers(outputs: Iterator[RequestOutput]) -> list[str | None]:
    return [output.text for output in sorted(outputs, key=lambda output: output.key)]


def expected(prompts: list[str]) -> list[str]:
    return [null_answer(row, prompt, 3) for row, prompt in enumerate(prompts)]


def test_a_generation_that_was_left_is_in_nobodys_way() -> None:
    engine = make_engine()
    for output in engine.generate(map(str, range(100)), THREE):
        assert output.text
        break
    assert answers(engine.generate(["a", "b"], THREE)) == expected(["a", "b"])


def test_a_source_that_was_left_waiting_feeds_nobody_later() -> None:
    engine, may_go_on = make_engine(), threading.Event()

    def slow() -> Iterator[str]:
        yield "first"
        may_go_on.wait(30)
        yield "late"

    for output in engine.generate(slow(), THREE):
        assert output.key == RequestKey(0)
        break

    def prompts() -> Iterator[str]:
        yield "a"
        may_go_on.set()
        for thread in threading.enumerate():
            if thread.name == "cbatch-feeder" and thread is not threading.current_thread():
                thread.join(30)
        yield "b"

    assert answers(engine.generate(prompts(), THREE)) == expected(["a", "b"])


def test_two_generations_at_once_are_refused_and_the_first_goes_on() -> None:
    engine = make_engine()
    first = engine.generate(["a", "b"], THREE)
    outputs = [next(first)]
    with pytest.raises(RuntimeError, match="another generate of this engine has not ended"):
        next(engine.generate(["c"], THREE))
    assert answers(iter([*outputs, *first])) == expected(["a", "b"])


def test_a_step_that_fails_does_not_spoil_the_engine() -> None:
    class BreaksOnce(NullRunner):
        is_broken = False

        def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
            if step.step_id == 1 and not self.is_broken:
                self.is_broken = True
                raise ValueError("out of order")
            return super().execute(step, stats)

    engine = make_engine(BreaksOnce())
    with pytest.raises(EngineError, match="out of order"):
        list(engine.generate(["a", "b"], THREE))
    scheduler = engine._loaded.client.scheduler  # type: ignore[attr-defined]
    scheduler.blocks.check_integrity(scheduler.running)
    assert scheduler.blocks.usage == 0.0 and not scheduler.has_unfinished
    assert answers(engine.generate(["a", "b"], THREE)) == expected(["a", "b"])


@pytest.mark.parametrize("prompts", ["text", {"role": "user"}])
def test_one_prompt_in_place_of_many_is_no_list_of_letters(prompts: Any) -> None:
    with pytest.raises(TypeError, match="put a single one into a list"):
        next(make_engine().generate(prompts, THREE))


def test_what_is_no_prompt_comes_back_with_an_error() -> None:
    given: list[Any] = [None, 1, "x", ["a", 1], b"bytes"]
    outputs = {output.key.row: output for output in make_engine().generate(given, THREE)}
    assert sorted(outputs) == [0, 1, 2, 3, 4]
    assert outputs[2].text == null_answer(2, "x", 3)
    errors = {row: error and error.type for row, o in outputs.items() if (error := o.error)}
    bad, unsupported = RowErrorType.BAD_TYPE, RowErrorType.UNSUPPORTED_OPTION
    # The model has no chat template for what could be a conversation.
    assert errors == {0: bad, 1: bad, 3: unsupported, 4: bad}


def test_requests_bring_their_own_key_and_params() -> None:
    request = Request(key=RequestKey(7), prompt_token_ids=(65, 66), params=THREE)
    (output,) = make_engine().generate([request])
    assert output.key == RequestKey(7) and output.text == null_answer(7, "AB", 3)
