from __future__ import annotations

from pathlib import Path

import pytest

from cbatch_cli.engine.memory import available_memory

MIB = 2**20


def make_machine(root: Path, *, available_mib: int, group: str) -> tuple[Path, Path]:
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable:   {available_mib * 1024} kB\nSwapFree: 7 kB\n"
    )
    (proc / "self/cgroup").write_text(f"0::{group}\n")
    (cgroup / group.lstrip("/")).mkdir(parents=True)
    return cgroup, proc


def limit(folder: Path, *, most: str, current_mib: int, cache_mib: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache_mib * MIB}\n")


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    cgroup, proc = make_machine(tmp_path, available_mib=500, group="/")
    assert available_memory(cgroup=cgroup, proc=proc) == 500 * MIB


@pytest.mark.parametrize("limited", ["job", "job/step"])
def test_the_tightest_cgroup_counts_and_its_file_cache_is_free(
    tmp_path: Path, limited: str
) -> None:
    cgroup, proc = make_machine(tmp_path, available_mib=500, group="/job/step")
    for name in ("job", "job/step"):
        limit(cgroup / name, most="max", current_mib=300, cache_mib=0)
    limit(cgroup / limited, most=str(400 * MIB), current_mib=300, cache_mib=40)
    assert available_memory(cgroup=cgroup, proc=proc) == 140 * MIB


def test_this_machine_has_some() -> None:
    assert 64 * MIB < available_memory() < 2**50
