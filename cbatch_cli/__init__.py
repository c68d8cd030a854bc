"""Run a file of prompts through a model: continuous batching in, Parquet out, no row lost.

The public names load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbatch_cli.api import Engine, run
    from cbatch_cli.config import EngineConfig
    from cbatch_cli.request import FinishReason, Request, RequestOutput, SamplingParams

    __version__: str

_MODULE_OF = {
    "Engine": "cbatch_cli.api",
    "EngineConfig": "cbatch_cli.config",
    "FinishReason": "cbatch_cli.request",
    "Request": "cbatch_cli.request",
    "RequestOutput": "cbatch_cli.request",
    "SamplingParams": "cbatch_cli.request",
    "run": "cbatch_cli.api",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _installed_version() -> str:
    from importlib import metadata  # a quarter of the time that `cbatch --help` takes

    try:
        return metadata.version("cbatch")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a source tree that was never installed
