"""Builds the optional CPU kernels; everything else is in pyproject.toml.

Every kernel is compiled once per instruction set, and the fastest that the processor knows is
chosen when the library is loaded. A machine without a compiler installs without the kernels.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = (
    *("attention", "elementwise", "gemm", "int8_gemm", "int8_groups", "largest", "layer"),
    "sampling",
)
# -ffp-contract: a multiplication and an addition become one instruction in every variant.
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast"]
FLAGS += ["-fno-exceptions", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Warnings that come from GCC's own headers of vector instructions.
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
VARIANTS = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    VARIANTS["avx512"] = [
        *VARIANTS["avx2"],
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ]


class BuildVariants(build_ext):
    """Compiles the sources of an extension once for each of `VARIANTS`."""

    def build_extension(self, ext: Extension) -> None:
        """Put the objects of all variants into one library."""
        folder = Path("kernels/cpu")
        headers = [str(path) for path in folder.glob("*.h")]
        objects = self.compiler.compile(
            [str(folder / "dispatch.cpp")],
            output_dir=self.build_temp,
            extra_postargs=FLAGS,
            depends=headers,
        )
        for variant, flags in VARIANTS.items():
            objects += self.compiler.compile(
                [str(folder / f"{name}.cpp") for name in SOURCES],
                output_dir=str(Path(self.build_temp) / variant),
                macros=[("CBATCH_VARIANT", variant)],
                extra_postargs=[*FLAGS, *flags],
                depends=headers,
            )
        # OpenMP is not linked: its symbols come from the runtime that torch has loaded, so that
        # both share one pool of threads.
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), target_lang="c++", libraries=["m"]
        )


extensions = []
if sys.platform == "linux":
    extensions.append(
        Extension(
            "cbatch_kernels.cpu_kernels",
            sources=[f"kernels/cpu/{name}.cpp" for name in ("dispatch", *SOURCES)],
            depends=[str(path) for path in Path("kernels/cpu").glob("*.h")],
            language="c++",
            optional=True,
        )
    )

setup(ext_modules=extensions, cmdclass={"build_ext": BuildVariants})
