"""Whatever a GPU's number, it is the current one while its model runs. The GPUs are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch_cli import assembly, engine_setup
from cbatch_cli.bench import gpu_suite
from cbatch_cli.bench.suite import SuiteSettings
from cbatch_cli.config import DEMO_MODEL, EngineConfig
from cbatch_cli.engine import device as engine_device
from cbatch_cli.engine.device import CudaGraphCapture, CudaQueue
from cbatch_cli.errors import UsageError
from cbatch_cli.models import loading, step_observation
from cbatch_cli.models.devices import on_device, resolve_device
from cbatch_cli.models.hf_model import HFModel
from tests.tiny_models import tiny_model

SECOND = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The current device last; empty where nobody has set one. There are two GPUs."""
    stack: list[torch.device] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        stack.append(device)
        try:
            yield
        finally:
            stack.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return stack


class Reached(Exception):
    """The work that is looked at has begun."""


def reached_on(current: list[torch.device], seen: list[torch.device]) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        seen.extend(current[-1:])
        raise Reached

    return work


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match="no usable GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == SECOND
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="this machine has 2 GPUs"):
        resolve_device("cuda:2")


def test_a_cpu_needs_no_current_device(current: list[torch.device]) -> None:
    with on_device(torch.device("cpu")):
        assert current == []
    with on_device(SECOND):
        assert current == [SECOND]
    assert current == []


def test_a_model_is_checked_on_its_device(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(loading, "HFModel", lambda *_, **__: SimpleNamespace())

    def settle(*_: Any) -> str:
        seen.extend(current[-1:])
        return "triton"

    monkeypatch.setattr(loading, "_settle_backend", settle)
    model: Any = SimpleNamespace(device=SECOND)
    loading.checked_model(
        model, "auto", max_model_len=9, eos_token_ids=frozenset(), generation_defaults={}
    )
    assert seen == [SECOND]


@pytest.mark.parametrize("replaced", ["_make_batch_invariant", "_fuse"])
def test_a_model_is_optimised_on_its_device(
    replaced: str, current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(assembly, replaced, reached_on(current, seen))
    model: Any = SimpleNamespace(device=SECOND, attention_backend="torch")
    with pytest.raises(Reached):
        assembly.optimise(model, EngineConfig())
    assert seen == [SECOND]


def test_an_engine_is_built_on_the_models_device(current: list[torch.device]) -> None:
    seen: list[torch.device] = []
    model: Any = SimpleNamespace(device=SECOND, unbind=reached_on(current, seen))
    with pytest.raises(Reached):
        engine_setup.build_core(model, EngineConfig())
    assert seen == [SECOND]


def test_an_observed_step_runs_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    running: list[bool] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    model = HFModel(
        tiny_model("llama"), max_model_len=64, eos_token_ids=frozenset(), generation_defaults={}
    )
    model.module.register_forward_pre_hook(lambda *_: running.append(bool(entered)))
    monkeypatch.setattr(step_observation, "on_device", noted)
    step_observation.observe_step(model, None)
    assert running == [True]


def test_the_suite_measures_the_device_that_it_is_told(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(gpu_suite, "measure_on", reached_on(current, seen))
    settings = SuiteSettings(engine=EngineConfig(device="cuda:1"), model=DEMO_MODEL, repeat=1)
    with pytest.raises(Reached):
        list(gpu_suite.measure(settings, print))
    assert seen == [SECOND]


class MadeUpEvent:
    """Notes where it was recorded."""

    def __init__(self, notes: list[Any], current: list[torch.device]) -> None:
        self._notes, self._current = notes, current

    def record(self) -> None:
        self._notes.append(("event", self._current[-1]))


def test_steps_are_launched_on_the_queues_device(
    current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: MadeUpEvent(notes, current))
    queue = CudaQueue(SECOND)
    queue.submit(lambda: notes.append(("work", current[-1])))
    assert notes == [("event", SECOND), ("work", SECOND), ("event", SECOND)]

    seen: list[torch.device] = []
    made_up_torch = SimpleNamespace(empty=reached_on(current, seen), uint8=torch.uint8)
    monkeypatch.setattr(engine_device, "torch", made_up_torch)
    with pytest.raises(Reached):
        queue.host_bytes(8)
    assert seen == [SECOND]


class MadeUpStream:
    """Notes for which stream it waits."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self._notes = name, notes

    def wait_stream(self, other: MadeUpStream) -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


class MadeUpGraph:
    """Notes when it is captured."""

    def __init__(self, notes: list[Any]) -> None:
        self._notes = notes

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._notes.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._notes.append("end")


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_recorded_between_what_comes_before_and_after(
    fails: bool, current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of their own, which waits for the current one and is waited for by it."""
    notes: list[Any] = []

    @contextmanager
    def on_stream(stream: MadeUpStream) -> Iterator[None]:
        notes.append(f"on {stream.name} of {current[-1]}")
        try:
            yield
        finally:
            notes.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MadeUpStream("own", notes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: MadeUpStream("current", notes))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: MadeUpGraph(notes))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: notes.append("synchronize"))

    def work() -> None:
        notes.append("work")
        if fails:
            raise Reached

    capture = CudaGraphCapture(SECOND)
    try:
        graph = capture.capture(work)
        assert isinstance(graph, MadeUpGraph) and not fails
    except Reached:
        assert fails
    assert notes == [
        "own waits for current",
        "on own of cuda:1",
        "synchronize",
        "begin in the pool, thread_local",
        "work",
        "end",
        "back",
        "current waits for own",
    ]
    assert current == []
