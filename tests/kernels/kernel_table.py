"""Writes `recipes/kernels.md`: what the compilers make of every kernel, for cards not at hand.

    python -m tests.kernels.kernel_table [RESULTS.jsonl]

compiles them, which takes some minutes of one core; the slow tests of this folder compile all head
dimensions, dtypes and features. With a file of results, each is put there as it comes, and
those that are there are not compiled again unless the kernel or its tiles have changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from tests.kernels.launches import SHARED_MEMORY_KB, TARGETS, Launch, compile_launch
from tests.kernels.variants import (
    FP8_DTYPES,
    attention_launches,
    grid,
    layer_launches,
    linear_launches,
    sampling_launches,
    store_launches,
)

PATH = Path(__file__).parent.parent.parent / "recipes" / "kernels.md"
_HEAD_DIMS = (128, 256)
_DTYPES = (torch.bfloat16, torch.float32)
_HEADER = """# Kernels

What triton {version} makes of the kernels, compiled ahead of time for cards that need not be there:

```bash
python -m tests.kernels.kernel_table
```

Of each kernel the worst of its variants: head dimensions {head_dims}, bfloat16, float32 and a
KV cache of eight bits, attention as it is and with a window, a soft cap and sinks. Spilled are
loads from and stores to local memory on NVIDIA, vector registers on AMD.
Most shared memory a program may have: {limits}.

| target | kernel | variants | registers | shared KB | spilled | tensor cores |
| --- | --- | --- | --- | --- | --- | --- |
"""


def launches_of(arch: str) -> Iterator[tuple[str, Launch]]:
    """Every kernel in every variant, with what tells the variant from others."""
    for variant in grid(arch):
        kv_dtypes = (None, FP8_DTYPES[arch][0])
        if variant.head_dim not in _HEAD_DIMS or variant.dtype not in _DTYPES:
            continue
        if variant.kv_dtype not in kv_dtypes:
            continue
        for number, launch in enumerate(attention_launches(variant, arch)):
            yield f"{variant.label} {number}", launch
    others: list[Launch] = []
    for dtype in _DTYPES:
        others += layer_launches(dtype) + linear_launches(dtype, arch)
        for head_dim in _HEAD_DIMS:
            for kv_dtype in (dtype, FP8_DTYPES[arch][0]):
                others += store_launches(dtype, kv_dtype, head_dim)
    others += sampling_launches()
    for number, launch in enumerate(others):
        yield f"other {number}", launch


def table(results: list[dict[str, Any]]) -> str:
    """The document."""
    limits = ", ".join(f"{kb} KB on {arch}" for arch, kb in SHARED_MEMORY_KB.items())
    head_dims = ", ".join(map(str, _HEAD_DIMS))
    lines = []
    for arch in TARGETS:
        of_arch = [result for result in results if result["arch"] == arch]
        for name in sorted({result["kernel"] for result in of_arch}):
            found = [result for result in of_arch if result["kernel"] == name]
            cores = sorted({core for result in found for core in result["tensor_cores"]})
            lines.append(
                f"| {arch} | {name} | {len(found)} | "
                f"{max(result['registers'] for result in found)} | "
                f"{max(result['shared_kb'] for result in found):.1f} | "
                f"{max(result['spilled'] for result in found)} | {' '.join(cores)} |\n"
            )
    header = _HEADER.format(version=triton.__version__, limits=limits, head_dims=head_dims)
    return header + "".join(lines)


def main() -> None:
    """Compile what is not in the results yet, and write the document."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "results.jsonl"
        path.touch()
        lines = path.read_text().splitlines()
        known = {(found["arch"], found["digest"]): found for found in map(json.loads, lines)}
        results = []
        with path.open("a") as file:
            for arch in TARGETS:
                for variant, launch in launches_of(arch):
                    digest = launch.digest
                    if found := known.get((arch, digest)):
                        results.append(found)
                        continue
                    compiled = compile_launch(launch, arch, Path(folder))
                    result = {
                        "arch": arch,
                        "variant": variant,
                        "digest": digest,
                        "kernel": launch.name,
                        "registers": compiled.registers,
                        "shared_kb": compiled.shared_kb,
                        "spilled": compiled.spilled,
                        "tensor_cores": compiled.tensor_cores,
                    }
                    results.append(result)
                    file.write(json.dumps(result) + "\n")
                    file.flush()
        PATH.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
