"""What the wrappers launch, caught without a device and compiled ahead of time."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from cbatch_kernels import (
    kv_store_jit,
    layers_jit,
    matmul_jit,
    paged_attention_jit,
    sampling_jit,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

JIT_MODULES = (kv_store_jit, layers_jit, matmul_jit, paged_attention_jit, sampling_jit)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY_KB = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TENSOR_CORE_NAMES = ("WGMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "UTCMMA", "HMMA", "QMMA", "v_mfma")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of a kernel, as triton would specialise it."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return self.kernel.__name__.removesuffix("_kernel")

    @property
    def digest(self) -> str:
        """Tells apart what is compiled: the code, the types and constants, the options."""
        options = sorted(self.options.items())
        return hashlib.sha256(f"{self.source().hash()} {options}".encode()).hexdigest()[:16]

    def source(self) -> ASTSource:
        """The kernel with its types, and with what is known of alignment."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            kind, is_aligned = "constexpr", False
            if isinstance(value, torch.Tensor):
                kind, is_aligned = f"*{_TYPES[value.dtype]}", True
            elif isinstance(value, float):
                kind = "fp32"
            elif not parameter.is_constexpr and (value != 1 or parameter.do_not_specialize):
                kind = "i32" if abs(value) < 2**31 else "i64"
                is_aligned = value % 16 == 0 and not parameter.do_not_specialize
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(index,)] = value
            if is_aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of a launch."""

    registers: int
    spilled: int
    """Loads from and stores to local memory on NVIDIA, spilled vector registers on AMD."""
    shared_kb: float
    tensor_cores: tuple[str, ...]
    has_wide_loads: bool


class _Recorder:
    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid), grid

        def launch(*positional: Any, **named: Any) -> None:
            names = [parameter.name for parameter in self._kernel.params]
            arguments = dict(zip(names, positional, strict=False))
            options = {name: value for name, value in named.items() if name not in names}
            arguments |= {name: value for name, value in named.items() if name in names}
            assert set(arguments) == set(names)
            self._launches.append(Launch(kernel=self._kernel, arguments=arguments, options=options))

        return launch


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Catch the launches of every wrapper instead of running them."""
    launches: list[Launch] = []
    replaced: list[tuple[ModuleType, str, JITFunction[Any]]] = []
    for module in JIT_MODULES:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                replaced.append((module, name, value))
    try:
        for module, name, kernel in replaced:
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


def compile_launch(launch: Launch, arch: str, folder: Path) -> Compiled:
    """Compile for `arch` and look at the machine code."""
    target = TARGETS[arch]
    compiled = triton.compile(launch.source(), target=target, options=launch.options)
    shared_kb = compiled.metadata.shared / 1024
    if target.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        return Compiled(
            registers=int(_first(r"\.vgpr_count:\s+(\d+)", assembly)),
            spilled=int(_first(r"\.vgpr_spill_count:\s+(\d+)", assembly)),
            shared_kb=shared_kb,
            tensor_cores=_instructions(assembly),
            has_wide_loads="load_dwordx4" in assembly,
        )
    cubin = folder / f"{launch.name}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    machine_code = _cuobjdump("-sass", cubin)
    return Compiled(
        registers=int(_first(r"REG:(\d+)", _cuobjdump("-res-usage", cubin))),
        spilled=len(re.findall(r"\b(?:LDL|STL)\b", machine_code)),
        shared_kb=shared_kb,
        tensor_cores=_instructions(machine_code),
        has_wide_loads=bool(re.search(r"LDG\S*\.128|LDGSTS\S*\.128|LDG\S*\.ENL2", machine_code)),
    )


def _cuobjdump(option: str, cubin: Path) -> str:
    command = [str(_TOOLS / "cuobjdump"), option, str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout + done.stderr


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"nothing like {pattern} in {text[:500]}"
    return found[1]


def _instructions(machine_code: str) -> tuple[str, ...]:
    return tuple(name for name in _TENSOR_CORE_NAMES if name in machine_code)
