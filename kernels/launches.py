"""Watches every launch of our Triton kernels, to count what a step does on a device."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


class _WatchedKernel:
    """In place of a kernel: as it is, but each launch is inside a context of its own."""

    def __init__(self, kernel: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._kernel, self._context = kernel, context

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch = self._kernel[grid]

        def watched(*arguments: Any, **options: Any) -> None:
            with self._context():
                launch(*arguments, **options)

        return watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@contextmanager
def watched_launches(around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Have each launch of a kernel inside `around(name)`, the name without its suffix.

    Imports triton. Interpreted launches are seen too; what a captured graph repeats is not.
    """
    kernels = []
    for module_info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module_info.name.endswith("_jit"):
            module = importlib.import_module(f"cbatch_kernels.{module_info.name}")
            kernels += [
                (module, name, kernel)
                for name, kernel in vars(module).items()
                if name.endswith("_kernel")
            ]
    # The wrappers look a kernel up in its module when they launch it.
    for module, name, kernel in kernels:
        context = functools.partial(around, name.removesuffix("_kernel"))
        setattr(module, name, _WatchedKernel(kernel, context))
    try:
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
