"""The tests find planted bugs: every mutant of the kernels fails the checks that kernels pass."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.attention.paged_cases import make_case
from tests.kernels.interpreted.attention_checks import (
    check_decode,
    check_prefill,
    check_store,
    small_tiles,
    with_fp8_cache,
)
from tests.kernels.interpreted.matmul_checks import (
    check_linear,
    check_rows_in_every_batch,
    check_weights_more_than_2_31_elements_apart,
)
from tests.kernels.interpreted.mutants import MUTANTS, Mutant
from tests.kernels.interpreted.test_interpreted_attention import (
    check_cache_of_more_than_2_31_elements,
    check_tables_that_end_where_memory_does,
)

_TIMEOUT_S = 900


def run_checks(folder: Path) -> None:
    """A few small cases, chosen so that tiles, blocks, windows and splits do not line up."""
    check_linear(19, 37, 21, has_bias=True, dtype=torch.float32)
    check_rows_in_every_batch(5, 3, 20, in_dim=33, dtype=torch.float32)
    check_weights_more_than_2_31_elements_apart(folder)
    fp8 = make_case([(40, 1)], head_dim=16, dtype=torch.float32, num_kv_heads=1, group_size=1)
    fp8 = check_store(with_fp8_cache(fp8, torch.float8_e4m3fn))
    check_decode(fp8, small_tiles(), num_splits=1)

    decodes = [(0, 1), (16, 1), (69, 1), (80, 1)]
    for window, num_splits, split_size in ((None, 3, None), (40, 4, 32)):
        case = make_case(
            decodes,
            head_dim=16,
            window=window,
            with_sinks=True,
            stored_already=1 if window else 0,
            num_kv_heads=1 if window else 2,
            dtype=torch.float32,
        )
        check_decode(check_store(case), small_tiles(), num_splits=num_splits, split_size=split_size)

    for window, with_sinks in ((None, True), (5, False), (20, False)):
        case = make_case(
            [(0, 18), (31, 17)],
            head_dim=16,
            window=window,
            with_sinks=with_sinks,
            num_kv_heads=2 if with_sinks else 1,
            group_size=3,
            dtype=torch.float32,
        )
        check_prefill(check_store(case), small_tiles())
    check_tables_that_end_where_memory_does()
    check_cache_of_more_than_2_31_elements(folder)


def exit_status(check: Callable[[], None]) -> int:
    """Run in a child, so that a crash is a result too: 0 if the check passes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"no result after {_TIMEOUT_S} s")


def test_the_kernels_pass(tmp_path: Path) -> None:
    run_checks(tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    name = f"cbatch_kernels.{mutant.module}"
    source = inspect.getsource(importlib.import_module(name))
    assert mutant.old in source, "the kernel has changed; so must the mutant"
    path = tmp_path / f"{mutant.module}.py"
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")

    def check_mutated() -> None:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        run_checks(tmp_path)

    # Reads out of bounds crash; pytest's report of that would look like a failure of its own.
    faulthandler.disable()
    assert exit_status(check_mutated) != 0, "no check has failed"
