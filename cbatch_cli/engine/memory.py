"""How much memory a process may still take. No torch here."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def available_memory(*, cgroup: Path = _CGROUP, proc: Path = _PROC) -> int:
    """Bytes that can be allocated without swapping: the machine's, or the cgroup's if fewer."""
    return min([_machine_memory(proc), *_cgroup_memory(cgroup, proc)])


def _machine_memory(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{proc}/meminfo does not say what is available")


def _cgroup_memory(root: Path, proc: Path) -> list[int]:
    """What each cgroup above this process leaves free; file cache counts as free."""
    free = []
    for folder in _cgroup_folders(root, proc):
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # not a version 2 memory cgroup
        if limit != "max":
            free.append(max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
    return free


def _cgroup_folders(root: Path, proc: Path) -> list[Path]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    # Version 2 is the line with hierarchy 0: `0::/path`.
    path = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
