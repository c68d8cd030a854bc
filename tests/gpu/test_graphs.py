"""On a GPU: recorded steps, steps in flight, and that nothing waits for the device in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.device import refuse_waiting
from cbatch_cli.engine.device_runner import DeviceModelRunner
from cbatch_cli.engine_setup import EngineLimits
from cbatch_cli.errors import UsageError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ("llama", "qwen3", "gemma3", "gemma2_softcap")


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def on_gpu(name: str, *, dtype: torch.dtype = torch.float32) -> HFModel:
    model = HFModel(
        tiny_model(name, dtype=dtype).to("cuda"),
        max_model_len=512,
        eos_token_ids=frozenset({7, 19, 80, 131}),
        generation_defaults={},
    )
    model.attention_backend = "triton"
    return model


def build(model: HFModel, **settings: Any) -> tuple[EngineCore, EngineLimits, list[str]]:
    sizes = {"num_kv_blocks": 200, "max_num_seqs": 11, "max_num_batched_tokens": 64}
    lines: list[str] = []
    core, limits = build_core(model, EngineConfig(**{**sizes, **settings}), lines.append)
    return core, limits, lines


def requests(count: int = 24, *, max_tokens: int = 40, **params: Any) -> list[Request]:
    """Every third greedy, the others drawn; of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_tokens": 5},
    ]
    return [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (1 + 13 * row % 90,), generator=generator).tolist()
            ),
            params=SamplingParams(max_tokens=max_tokens, **{**kinds[row % 3], **params}),
        )
        for row in range(count)
    ]


def generate(core: EngineCore, given: list[Request]) -> dict[int, tuple[int, ...]]:
    outputs = {output.key.row: output for output in core.generate(given)}
    assert {row: o.error for row, o in outputs.items() if o.error} == {}
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0.0
    return {row: tuple(output.token_ids) for row, output in outputs.items()}


def runner_of(core: EngineCore) -> DeviceModelRunner:
    runner = core._runner
    assert isinstance(runner, DeviceModelRunner)
    return runner


def watch_logits(core: EngineCore) -> list[Tensor]:
    """Copies of the logits of each step, in order."""
    sampler = runner_of(core)._sampler
    sample, seen = sampler.sample, []

    def watched(logits: Tensor, *others: Any) -> Tensor:
        seen.append(logits.clone())
        return sample(logits, *others)

    sampler.sample = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_have_the_logits_of_eager_ones(name: str) -> None:
    given = requests(11, temperature=0.0, ignore_eos=True)
    model = on_gpu(name)
    core, limits, lines = build(model)
    assert limits.cuda_graphs and not lines, lines
    replayed = watch_logits(core)
    ids = generate(core, given)
    core, limits, _ = build(model, cuda_graphs=False)
    assert not limits.cuda_graphs
    eager = watch_logits(core)
    assert generate(core, given) == ids
    assert len(replayed) == len(eager) > 40
    for one, other in zip(replayed, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_step_in_flight_changes_no_id(cuda_graphs: bool, dtype: torch.dtype) -> None:
    model = on_gpu("llama", dtype=dtype)
    # One at a time, so that a row's logits have the same bits in both runs.
    core, limits, _ = build(model, cuda_graphs=cuda_graphs, max_num_seqs=1)
    assert limits.overlap
    overlapping = generate(core, requests())
    core, limits, _ = build(model, cuda_graphs=cuda_graphs, max_num_seqs=1, overlap=False)
    assert not limits.overlap and runner_of(core).lag == 0
    assert generate(core, requests()) == overlapping


def test_many_rows_in_flight_have_the_ids_of_few() -> None:
    """Greedy float32 ids of rows far from ties do not depend on the batch."""
    given = requests(40, temperature=0.0)
    model = on_gpu("llama")
    core, _, _ = build(model, num_kv_blocks=60)
    assert core.scheduler.max_num_seqs == 11
    many = generate(core, given)
    assert core.stats.num_preemptions > 0
    core, _, _ = build(model, max_num_seqs=2, overlap=False, cuda_graphs=False)
    few = generate(core, given)
    differing = [row for row, ids in many.items() if ids != few[row]]
    assert len(differing) <= 2, "more than rounding explains"


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_nothing_waits_for_the_device(cuda_graphs: bool) -> None:
    core, _, _ = build(on_gpu("llama"), cuda_graphs=cuda_graphs)
    generate(core, requests())  # kernels are compiled
    with refuse_waiting():
        generate(core, requests())


def test_the_profiler_sees_no_synchronisation_of_streams() -> None:
    core, _, _ = build(on_gpu("llama"))
    generate(core, requests())
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        generate(core, requests())
    counts = {event.key: event.count for event in profile.key_averages()}
    assert not [name for name in counts if "StreamSynchronize" in name], counts
    launches = sum(count for name, count in counts.items() if "GraphLaunch" in name)
    assert launches > 40, counts


def test_steps_are_launched_while_another_runs() -> None:
    model = on_gpu("llama")
    mlp = model.module.model.layers[0].mlp
    forward = mlp.forward

    def slow(states: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)  # cycles: longer than the CPU takes for a step
        return forward(states)

    mlp.forward = slow
    core, _, _ = build(model, cuda_graphs=False)
    launch, launched = runner_of(core).launch, []
    was_running = []

    def watched(step: Any, stats: Any) -> Any:
        if launched:
            was_running.append(not launched[-1].ticket.end.query())
        launched.append(launch(step, stats))
        return launched[-1]

    runner_of(core).launch = watched  # type: ignore[method-assign]
    generate(core, requests(12))
    assert sum(was_running) > len(was_running) / 2
    assert 0.5 * core.stats.wall_s < core.stats.device_s


def test_a_model_that_reads_back_from_the_device_runs_eager() -> None:
    model = on_gpu("llama")
    mlp = model.module.model.layers[0].mlp
    forward = mlp.forward

    def reading_back(states: Tensor) -> Tensor:
        assert float(states.abs().max()) >= 0.0
        return forward(states)

    given = requests(6, temperature=0.0)
    expected = generate(build(model, cuda_graphs=False)[0], given)
    mlp.forward = reading_back
    core, limits, lines = build(model)
    assert not limits.cuda_graphs
    assert len(lines) == 1 and lines[0].startswith("CUDA graphs are not in use: RuntimeError")
    assert generate(core, given) == expected
    with pytest.raises(UsageError, match="--cuda-graphs is not possible: RuntimeError"):
        build(model, cuda_graphs=True)
    mlp.forward = forward
    core, limits, lines = build(model)
    assert limits.cuda_graphs and not lines, "what failed before has left nothing behind"
    assert generate(core, given) == expected


def test_a_capture_that_fails_half_way_leaves_the_device_usable() -> None:
    """Waiting is refused before anything is recorded; here it is first done while recording."""
    model = on_gpu("llama")
    mlp = model.module.model.layers[0].mlp
    forward = mlp.forward

    def reading_back(states: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            float(states.abs().max())
        return forward(states)

    mlp.forward = reading_back
    core, limits, lines = build(model)
    assert not limits.cuda_graphs and len(lines) == 1
    given = requests(6, temperature=0.0)
    found = generate(core, given)
    mlp.forward = forward
    core, limits, _ = build(model)
    assert limits.cuda_graphs
    assert generate(core, given) == found


def test_the_pool_leaves_room_for_the_largest_step() -> None:
    model = on_gpu("llama", dtype=torch.bfloat16)
    core, limits, _ = build(
        model, num_kv_blocks=None, gpu_memory_utilization=0.5, max_num_batched_tokens=4096
    )
    torch.cuda.reset_peak_memory_stats()
    generate(core, requests(200, max_tokens=4))
    total = torch.cuda.get_device_properties(0).total_memory
    assert limits.num_blocks >= 1
    assert torch.cuda.max_memory_reserved() < 0.5 * total
    assert core.stats.num_preemptions == 0


def test_what_recording_takes(record_property: Any) -> None:
    model = on_gpu("qwen3", dtype=torch.bfloat16)
    start = time.monotonic()
    _, limits, _ = build(model, max_num_seqs=256, max_num_batched_tokens=512)
    assert limits.cuda_graphs
    record_property("seconds", round(time.monotonic() - start, 3))
