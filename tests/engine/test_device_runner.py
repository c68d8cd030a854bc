"""Tiny models on a fake device that does its work as late as it may.

The judge is the synchronous engine on the host; for sampling, the fake device with no step in
flight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine import device_runner
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.input_buffer import Packet
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput
from cbatch_cli.errors import EngineError, RowErrorType
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, RequestOutput, SamplingParams
from tests.fake_device import (
    LateQueue,
    LateTicket,
    PlainSampling,
    RefuseWaiting,
    device_core,
    noise_of,
    runner_of,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model

EOS = frozenset({7, 19, 80, 131, 200, 257})
"""Enough ids for some rows to end by one of them."""
NAMES = ("llama", "gemma3", "gpt_oss_sinks")


@functools.cache
def wrapped(name: str) -> HFModel:
    return HFModel(tiny_model(name), max_model_len=96, eos_token_ids=EOS, generation_defaults={})


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())


GREEDY = SamplingParams(max_tokens=12)
MIXED_PARAMS = (
    GREEDY,
    SamplingParams(max_tokens=14, temperature=1.0),
    SamplingParams(max_tokens=9, temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=15, ignore_eos=True, stop_token_ids=(3, 5, 8, 13, 21, 34, 55, 89)),
    SamplingParams(max_tokens=10, min_tokens=6, temperature=1.3, min_p=0.02, seed=2**64 - 3),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=11, min_tokens=9, stop_token_ids=(2, 4)),
)


def requests_of(params: Sequence[SamplingParams], *, shared: int = 9) -> list[Request]:
    """Rows that begin alike, then differ in what they hold and in length."""
    return [
        Request(
            key=RequestKey(row // 2, row % 2),
            prompt_token_ids=prompt(shared, 0) + prompt(1 + 5 * row % 23, row + 1),
            params=row_params,
        )
        for row, row_params in enumerate(params)
    ]


def run(core: EngineCore, requests: Sequence[Request]) -> dict[RequestKey, RequestOutput]:
    for request in requests:
        core.submit(request)
    outputs: dict[RequestKey, RequestOutput] = {}
    for output in core.generate([]):
        assert output.key not in outputs
        outputs[output.key] = output
    core.scheduler.check_integrity()
    assert core.scheduler.blocks.usage == 0.0 and core.scheduler.num_in_flight == 0
    return outputs


def ids(outputs: dict[RequestKey, RequestOutput]) -> dict[RequestKey, tuple[int, ...]]:
    assert all(output.error is None for output in outputs.values())
    return {key: tuple(output.token_ids) for key, output in outputs.items()}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_those_of_the_engine_on_the_host(name: str) -> None:
    requests = requests_of([GREEDY, MIXED_PARAMS[3], MIXED_PARAMS[6]] * 3)
    config = EngineConfig(
        block_size=4, num_kv_blocks=200, max_num_seqs=4, max_num_batched_tokens=16
    )
    wrapped(name).attention_backend = "torch"
    expected = ids(run(build_core(wrapped(name), config)[0], requests))
    queue = LateQueue()
    core = device_core(wrapped(name), queue=queue, num_blocks=200)
    assert ids(run(core, requests)) == expected
    assert queue.most_pending == 2, "a step is in flight while the next is launched"
    assert core.stats.device_s == 0.25 * core.stats.num_steps
    assert core.scheduler.num_surplus_tokens > 0


@settings(max_examples=15, deadline=None)
@given(
    params=st.lists(st.sampled_from(MIXED_PARAMS), min_size=1, max_size=9),
    name=st.sampled_from(NAMES),
    spare_blocks=st.integers(0, 6),
    block_size=st.sampled_from([2, 4, 16]),
    max_num_seqs=st.integers(1, 5),
    budget=st.sampled_from([5, 16, 64]),
    prefix_caching=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_step_in_flight_changes_no_id(
    params: list[SamplingParams],
    name: str,
    spare_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    prefix_caching: bool,
    seed: int,
) -> None:
    requests = requests_of(params)

    def generate(lag: int) -> dict[RequestKey, tuple[int, ...]]:
        model = wrapped(name)
        num_groups = 2 if name != "llama" else 1
        core = device_core(
            model,
            queue=LateQueue(),
            lag=lag,
            num_blocks=num_groups * -(-50 // block_size) + spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefix_caching=prefix_caching,
            seed=seed,
        )
        return ids(run(core, requests))

    assert generate(1) == generate(0)


@pytest.mark.parametrize("seed", [None, 2**64 - 3])
def test_draws_are_those_of_the_noise_of_row_sample_and_position(seed: int | None) -> None:
    """By the model's own attention, one sequence at a time, and the reference's noise."""
    model, run_seed = wrapped("llama"), 5
    params = SamplingParams(max_tokens=5, temperature=0.9, min_tokens=3, seed=seed)
    requests = [
        Request(key=RequestKey(row, sample), prompt_token_ids=prompt(7, 0), params=params)
        for row in (2, 2**33 + 2)
        for sample in (0, 1)
    ]
    core = device_core(model, queue=LateQueue(), seed=run_seed)
    drawn = ids(run(core, requests))
    assert len(set(drawn.values())) == len(requests)
    for key, token_ids in drawn.items():
        known = list(prompt(7, 0))
        for number, token_id in enumerate(token_ids):
            last = torch.tensor([len(known) - 1])
            logits = model.eager_logits(torch.tensor(known), last)[0].double() / 0.9
            if number < 3:
                logits[list(EOS)] = -torch.inf
            noise = noise_of(
                len(logits),
                seed=run_seed if seed is None else seed,
                row=key.row,
                sample=key.sample,
                position=len(known),
            )
            assert token_id == int((logits + noise).argmax())
            known.append(token_id)


def test_what_a_step_adds_may_outgrow_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(MIXED_PARAMS)
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests))
    monkeypatch.setattr(device_runner, "_FIRST_EXTRA_BYTES", 16)
    assert ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests)) == expected


def test_a_pool_that_is_too_small_for_all_preempts() -> None:
    requests = requests_of([SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9)] * 6)
    roomy = device_core(wrapped("llama"), queue=LateQueue(), num_blocks=200, max_num_seqs=4)
    expected = ids(run(roomy, requests))
    core = device_core(wrapped("llama"), queue=LateQueue(), num_blocks=14, max_num_seqs=4)
    assert ids(run(core, requests)) == expected
    assert core.stats.num_preemptions > 0 and roomy.stats.num_preemptions == 0


def test_prefixes_are_shared() -> None:
    core = device_core(wrapped("llama"), queue=LateQueue(), num_blocks=200, max_num_seqs=2)
    run(core, requests_of([GREEDY] * 6))
    assert core.stats.num_cached_tokens > 0


class Treacherous:
    """A model some of whose steps end otherwise than they should."""

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self.device = model.device
        self.num_steps = 0
        self.error_at: dict[int, Exception] = {}
        self.broken_at: dict[int, int] = {}

    def forward(self, token_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        assert int(token_ids.min()) >= 0 and int(token_ids.max()) < VOCAB_SIZE
        step, self.num_steps = self.num_steps, self.num_steps + 1
        logits = self._model.forward(token_ids, position_ids, sample_indices)
        if step in self.error_at:
            raise self.error_at[step]
        if step in self.broken_at:
            logits[self.broken_at[step]] = torch.nan
        return logits


def treacherous_core(**settings: object) -> tuple[EngineCore, Treacherous]:
    core = device_core(wrapped("llama"), queue=LateQueue(), **settings)  # type: ignore[arg-type]
    model = Treacherous(wrapped("llama"))
    runner_of(core)._model = model  # type: ignore[assignment]
    return core, model


DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8)


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    requests = requests_of([DRAWN] * 3)
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests))
    core, model = treacherous_core()
    model.broken_at = {6: 1}
    outputs = run(core, requests)
    failed = [key for key, output in outputs.items() if output.error is not None]
    assert len(failed) == 1
    error = outputs[failed[0]].error
    assert error is not None and error.type is RowErrorType.ENGINE_ERROR
    assert "not finite" in error.message
    for key, output in outputs.items():
        assert output.token_ids == expected[key][: len(output.token_ids)]
        assert key in failed or output.error is None


def test_a_step_that_does_not_fit_is_computed_again_with_the_one_after_it() -> None:
    requests = requests_of([DRAWN] * 5)
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests))
    core, model = treacherous_core()
    model.error_at = {4: torch.OutOfMemoryError("CUDA out of memory")}
    assert ids(run(core, requests)) == expected
    assert core.stats.num_preemptions > 0


def test_an_error_of_the_device_ends_the_run_and_the_engine_can_be_used_again() -> None:
    requests = requests_of([DRAWN] * 5)
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests))
    core, model = treacherous_core()
    runner = runner_of(core)
    fill = runner._inputs.fill

    def watched(arrays: Mapping[str, Any], turn: int) -> Packet:
        last_use = runner._last_use[turn]
        assert not isinstance(last_use, LateTicket) or last_use.is_done, "it is still needed"
        return fill(arrays, turn)

    runner._inputs.fill = watched  # type: ignore[method-assign]
    model.error_at = {5: RuntimeError("an illegal memory access was encountered")}
    with pytest.raises(EngineError, match="step 5 failed: an illegal memory access"):
        run(core, requests)
    assert ids(run(core, requests)) == expected


def test_a_launch_that_fails_leaves_nothing_that_still_reads_its_inputs() -> None:
    """A queue that starts at once, as a GPU does, while copies are still on their way."""

    class Eager(LateQueue):
        fails = False

        def submit(self, work: object) -> object:  # type: ignore[override]
            ticket = super().submit(work)  # type: ignore[arg-type]
            if self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ticket

    requests = requests_of([DRAWN] * 5)
    expected = ids(run(device_core(wrapped("llama"), queue=LateQueue()), requests))
    queue = Eager()
    core = device_core(wrapped("llama"), queue=queue)
    launch = runner_of(core).launch
    most_pending = []

    def launch_one_badly(step: SchedulerOutput, stats: EngineStats) -> object:
        queue.fails = step.step_id == 5
        try:
            return launch(step, stats)
        except Exception:
            most_pending.append(len(queue.pending))
            raise

    runner_of(core).launch = launch_one_badly  # type: ignore[method-assign, assignment]
    assert ids(run(core, requests)) == expected
    assert most_pending == [0]


def test_a_step_in_which_nobody_samples() -> None:
    long = Request(key=RequestKey(0), prompt_token_ids=prompt(40, 1), params=GREEDY)
    wrapped("llama").attention_backend = "torch"
    config = EngineConfig(block_size=4, num_kv_blocks=64, max_num_batched_tokens=16)
    expected = ids(run(build_core(wrapped("llama"), config)[0], [long]))
    assert ids(run(device_core(wrapped("llama"), queue=LateQueue()), [long])) == expected


class TensorSampling(PlainSampling):
    """Draws nothing, and reads nothing back."""

    def filter_thresholds(
        self, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, thresholds: Tensor
    ) -> None:
        thresholds.copy_(logits.amax(dim=-1) + min_p.clamp_min(1e-3).log())

    def gumbel_argmax(
        self,
        logits: Tensor,
        temperature: Tensor,
        thresholds: Tensor,
        token_ids: Tensor,
        **identity: Tensor,
    ) -> None:
        token_ids.copy_(logits.argmax(dim=-1))


def test_nothing_of_a_step_waits_for_the_device() -> None:
    # Prompts of one token, since the attention of chunks here does wait.
    requests = [
        Request(key=RequestKey(row), prompt_token_ids=(row + 1,), params=params)
        for row, params in enumerate(MIXED_PARAMS)
    ]
    queue = LateQueue()
    core = device_core(wrapped("llama"), queue=queue, kernels=TensorSampling())
    do_next = queue.do_next

    def watched() -> None:
        with RefuseWaiting():
            do_next()

    queue.do_next = watched  # type: ignore[method-assign]
    outputs = ids(run(core, requests))
    assert sum(map(len, outputs.values())) > 30
    with pytest.raises(RuntimeError, match="waits for the device"), RefuseWaiting():
        torch.zeros(1).item()


def test_tables_hold_the_blocks_of_every_group() -> None:
    core = device_core(wrapped("gemma3"), queue=LateQueue(), num_blocks=100)
    runner = runner_of(core)
    run(core, requests_of(MIXED_PARAMS))
    assert np.array_equal(runner._tables.numpy(), runner._host_tables)
    assert runner._host_tables.any(axis=(1, 2)).all()
    # 96 positions in blocks of 4; rows of other widths would have kernels compiled anew.
    assert runner._host_tables.shape == (len(core.scheduler.blocks.windows), 4, 32)
