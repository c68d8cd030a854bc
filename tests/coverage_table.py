"""The recipe that lists the model types: how `recipes/models.md` is written and read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import transformers

TABLE_PATH = Path(__file__).parent.parent / "recipes" / "models.md"

_VERSION = re.compile(r"transformers (\S+) knows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a model type."""

    kind: Literal["works", "refused", "no decoder"]
    reason: str = ""
    """Of a type that is not run: the sentence with which it is refused."""
    fused: Literal["layers", "parts", "nothing"] = "nothing"
    """Whether all its layers are fused as a whole, or what can be of them."""
    needs_is_decoder: bool = False
    """Whether its config has to say that it is a decoder, which is not the default."""


def recorded_version(table: str) -> str:
    """The version of transformers that a table was made with."""
    match = _VERSION.search(table)
    return match[1] if match else "unknown"


def coverage_table(outcomes: Mapping[str, Outcome]) -> str:
    """The page, one line for each type."""
    counts = {
        kind: sum(outcome.kind == kind for outcome in outcomes.values())
        for kind in ("works", "refused", "no decoder")
    }
    fused = [outcome.fused for outcome in outcomes.values() if outcome.kind == "works"]
    head = f"""\
# Models

transformers {transformers.__version__} knows {len(outcomes)} types of causal language models. \
{counts["works"]} of them work, {counts["refused"]} are refused
when they are loaded, and {counts["no decoder"]} are not decoders of text.

"Works" means that a tiny random model of the type, run in packed, mixed, chunked steps, gives the \
logits of its own
attention code on whole rows to 1e-5, with rows longer than its window: in plain PyTorch, with the \
compiled CPU kernels,
and, to 3e-5, with the layers fused that can be, over the kernels and over torch. A model is \
checked again each time it is loaded.
The type is `model_type` in a model's `config.json`.

On a CPU, every layer of {fused.count("layers")} types is fused into one step; of \
{fused.count("parts")} types parts of layers are fused (norms,
gated MLPs, projections of the same input), and of {fused.count("nothing")} types nothing. \
`cbatch doctor -m MODEL` tells why.

`RECORD_COVERAGE=1 python -m pytest tests/models/test_coverage.py` writes this page.

| type | | fused | |
| --- | --- | --- | --- |
"""
    return head + "".join(_line(name, outcome) for name, outcome in sorted(outcomes.items()))


def _line(name: str, outcome: Outcome) -> str:
    if outcome.kind == "works":
        note = "with `is_decoder` in its config" if outcome.needs_is_decoder else ""
        return f"| `{name}` | works | {outcome.fused} | {note} |\n"
    return f"| `{name}` | {outcome.kind} | | {_stable(outcome.reason)} |\n"


def _stable(reason: str) -> str:
    """The sentence without what changes with the machine: sizes of errors, torch's own words."""
    reason = reason.partition(" cannot be run: ")[2] or reason
    reason = re.sub(r" by \S+ of the logits' spread, where.*", "", reason)
    return re.sub(r"(packed tokens end in \w+):.*", r"\1", reason)
