"""The kernel tests once more, on a library built with address and undefined-behaviour checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = [
    "tests/kernels/test_cpu_head.py",
    "tests/kernels/test_cpu_bfloat16_linear.py",
    "tests/kernels/test_cpu_layers.py",
    "tests/kernels/test_cpu_linear.py",
    "tests/kernels/test_cpu_sampling.py",
    "tests/attention/test_cpu_backend.py",
    "tests/models/test_pruned_layer.py",
]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"

# The tests import the library from the folder of its sources: they are told of another one.
RUN = """
import sys
from pathlib import Path
import cbatch_kernels.cpu_library as cpu_library
cpu_library.LIBRARY_FOLDER = Path(sys.argv[1])
assert cpu_library.load_kernels()
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def runtime_library(name: str) -> str:
    compiler = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(compiler, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_kernel_tests_under_the_sanitizers(tmp_path: Path) -> None:
    flags = {"CFLAGS": f"-g {SANITIZERS}", "LDFLAGS": SANITIZERS}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    build += ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, **flags})
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(runtime_library, ("libasan.so", "libubsan.so"))),
        # Python and torch keep memory until the end; the kernels keep none.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-c", RUN, str(tmp_path / "lib" / "cbatch_kernels"), *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout
