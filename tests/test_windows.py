"""Models with sliding windows, whose blocks are given up, answer as transformers does.

Cache blocks hold NaN from the moment in which they are handed out or given up: a layer that read
beyond its window would spoil its row.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch

from cbatch_cli.assembly import build_core
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.kv_groups import group_layers, sequence_blocks
from cbatch_cli.models.attention_hook import binding_of
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.cpu_variants import variants
from tests.fakes import poison_blocks
from tests.models.test_families import wrapped
from tests.test_exactness import Expected, requests_of, run, transformers_generate
from tests.tiny_models import tiny_model

NUM_GROUPS = {"gemma3": 3, "gemma2_softcap": 3, "mistral_window": 1, "gpt_oss_sinks": 3}
NEEDS_KERNELS = pytest.mark.skipif(not variants(), reason="the CPU kernels were not built")
CASES: Mapping[str, dict[str, Any]] = {
    "block1-tight": {"block_size": 1, "budget": 7, "max_num_seqs": 6, "spare_blocks": 9},
    "block4-tight": {"block_size": 4, "budget": 16, "max_num_seqs": 4, "spare_blocks": 2},
    "block4-alone": {"block_size": 4, "budget": 64, "max_num_seqs": 1, "spare_blocks": 0},
    "block16-ample": {"block_size": 16, "budget": 40, "max_num_seqs": 8, "spare_blocks": 200},
}


@functools.cache
def expected_rows(name: str) -> tuple[Expected, ...]:
    """Rows of 1 to 70 tokens, half of which begin alike, beyond every window."""
    noise = random.Random(3)
    oracle = tiny_model(name)
    shared = noise.choices(range(256), k=60)
    rows = []
    for row in range(12):
        own = noise.choices(range(256), k=noise.choice((1, 6, 30, 70)))
        prompt = shared[: noise.choice((17, 40, 60))] + own[:10] if row % 2 else own
        rows.append(transformers_generate(oracle, prompt, max_new_tokens=noise.randint(8, 30)))
    return tuple(rows)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no_prefix"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NEEDS_KERNELS)])
@pytest.mark.parametrize("name", NUM_GROUPS)
def test_greedy_ids_are_those_of_transformers(
    name: str, backend: Literal["torch", "cpu"], case: str, prefix_caching: bool
) -> None:
    rows = expected_rows(name)
    model = wrapped(name)
    model.attention_backend = backend
    windows = group_layers(model.layer_specs).windows
    assert len(windows) == NUM_GROUPS[name]
    settings = dict(CASES[case])
    longest = max(len(row.prompt) + len(row.token_ids) for row in rows)
    spare_blocks, budget = settings.pop("spare_blocks"), settings.pop("budget")
    num_blocks = sequence_blocks(windows, longest, settings["block_size"]) + spare_blocks
    config = EngineConfig(
        num_kv_blocks=num_blocks,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
        **settings,
    )
    core, _ = build_core(model, config)
    poison_cache(model, core)
    requests = requests_of(rows)
    for row, output in run(core, requests).items():
        rows[row].check(output)
    if case.endswith("tight") and None in windows:
        assert core.stats.num_preemptions > 0
    elif not case.endswith("tight"):
        assert core.stats.num_preemptions == 0
    assert prefix_caching or core.stats.num_cached_tokens == 0
    if case == "block16-ample" and prefix_caching:
        assert core.stats.num_cached_tokens > 0


def poison_cache(model: HFModel, core: EngineCore) -> None:
    """Fill the cache with NaN, and every block again whenever it holds nothing."""
    backend, _ = binding_of(model.attention_modules[0])
    caches = backend._caches  # type: ignore[attr-defined]
    pairs = caches.values() if isinstance(caches, Mapping) else caches
    tensors = [tensor for pair in pairs for tensor in pair]

    def poison(block_ids: list[int]) -> None:
        for tensor in tensors:
            tensor[block_ids] = math.nan

    poison(list(range(core.scheduler.blocks.allocator.num_blocks)))
    poison_blocks(core.scheduler.blocks.allocator, poison)


def test_the_oracle_is_sure_of_its_ids() -> None:
    for name in NUM_GROUPS:
        rows = expected_rows(name)
        assert sum(row.first_tie is not None for row in rows) <= 1
        assert max(len(row.prompt) for row in rows) == 70


@torch.inference_mode()
def test_a_layer_that_sees_beyond_its_window_is_found_out() -> None:
    """The poison works: with a window kept too short, rows fail."""
    rows = expected_rows("gemma3")
    model = wrapped("gemma3")
    core, _ = build_core(model, EngineConfig(block_size=4, max_num_batched_tokens=16))
    core.scheduler.blocks._window_groups = [
        (group, window - 5) for group, window in core.scheduler.blocks._window_groups
    ]
    poison_cache(model, core)
    core.submit(
        Request(
            key=RequestKey(0),
            prompt_token_ids=max((row.prompt for row in rows), key=len),
            params=SamplingParams(max_tokens=9, ignore_eos=True),
        )
    )
    core.scheduler.blocks.prefix_caching = False
    (output,) = core.generate(())
    assert output.error is not None and "not finite" in output.error.message
