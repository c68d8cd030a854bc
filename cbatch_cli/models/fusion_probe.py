"""One run of a model's own code, by which it is judged whether a fused part computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.cpu_head import LargestLogits
from torch import Tensor, nn

from cbatch_cli.attention.torch_backend import TorchAttentionBackend
from cbatch_cli.models.fused_norm import MOST_OTHER_ROUNDINGS, NotFusable, other_roundings
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import NotingBackend, first_step_metadata, layer_caches

# Largest root mean square of the difference, as a share of the output's.
TOLERANCE = 2e-5
ROUNDED_TOLERANCE = 0.05
"""With weights of 8 bits: this finds a wrong product, not a rounded one."""

HALF_DTYPES = (torch.float16, torch.bfloat16)

_LENGTHS = (9, 4)
_FIRST_POSITION, _POSITION_STEP = 60, 7
"""Rotations of early positions are close to none, and some models scale queries from some position
on: the second row has the last positions of all. Attention does not look at positions."""
_ROUNDINGS = 3.0
"""In half precision: how many units in the last place the difference may be, as `TOLERANCE`."""
_LARGEST_SLOPE = 0.125
"""What of that may be a factor that all values share: rounding goes up as often as down."""


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """What a module was given and gave, the last time that it ran."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    given: Any
    """Its first argument itself, not a copy: modules that were given the same can be told."""


class Probe:
    """Runs `model` once with its own code and keeps what its modules were given and gave.

    Leaves a backend bound to the model.
    """

    def __init__(self, model: HFModel) -> None:
        self.runs: dict[nn.Module, ModuleRun] = {}
        self._model = model
        block_size = max(_LENGTHS)
        caches = layer_caches(model, num_blocks=len(_LENGTHS), block_size=block_size, value=0.0)
        backend = NotingBackend(TorchAttentionBackend(model.layer_specs, caches, block_size))
        backend.begin_step([first_step_metadata(_LENGTHS, block_size, model.device)])
        self.calls = backend.calls
        """By the index of the attention layer."""
        model.bind(backend)
        handles = [
            module.register_forward_hook(self._note, with_kwargs=True)
            for module in model.module.modules()
        ]
        try:
            self.logits = self.logits_now()
            """float32 `[N, vocab]` of the model as it was."""
        finally:
            for handle in handles:
                handle.remove()

    def logits_now(self) -> Tensor:
        """Logits `[N, vocab]` of the same tokens by the model as it is."""
        return self._model.forward(*self._inputs())

    def largest_logits_now(self) -> Tensor | LargestLogits:
        """The same if it is asked for the largest alone."""
        return self._model.forward_largest(*self._inputs())

    def check_logits(self) -> None:
        """Raise `NotFusable` if the model as it is fails, or gives other logits than it did."""
        try:
            logits = self.logits_now()
        except (RuntimeError, ValueError) as error:
            raise NotFusable(f"the model's code fails: {str(error).splitlines()[0]}") from None
        errors = (logits - self.logits).square().mean(dim=-1).sqrt() / self.logits.std(dim=-1)
        is_half = self._model.dtype in HALF_DTYPES
        # In half precision, rounding sends some token of a mixture of experts to other experts.
        difference, allowed = (errors.median(), 0.1) if is_half else (errors.max(), 1e-4)
        if not float(difference) <= allowed:
            raise NotFusable(f"the model's logits differ by {difference:.1g} of their spread")

    def rows_given_to(self, module: nn.Module) -> Tensor:
        """The one tensor that `module` was called with. Raises `NotFusable` if there was more."""
        run = self.runs.get(module)
        if run is None:
            raise NotFusable("it does not run in every step")
        if len(run.args) != 1 or run.kwargs or not isinstance(run.args[0], Tensor):
            raise NotFusable("it is not given one tensor alone")
        rows: Tensor = run.args[0]
        return rows

    def compare_part(
        self, module: nn.Module, forward: Callable[[Tensor], Tensor], what: str = "it"
    ) -> None:
        """Raise `NotFusable` if `forward` gives another output than `module` did."""
        rows = self.rows_given_to(module)
        try:
            actual = forward(rows)
        except (RuntimeError, ValueError) as error:
            raise NotFusable(f"its fused form fails: {str(error).splitlines()[0]}") from None
        check_equal(actual, self.runs[module].output, what)

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions, and the tokens whose logits are looked at."""
        num_tokens, device = sum(_LENGTHS), self._model.device
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(self._model.vocab_size, (num_tokens,), generator=generator)
        early, late = (torch.arange(length, device=device) * _POSITION_STEP for length in _LENGTHS)
        positions = torch.cat([_FIRST_POSITION + early, -1 - late.flip(0)])
        return (
            token_ids.to(device),
            positions % self._model.max_model_len,
            torch.arange(num_tokens - _LENGTHS[-1], num_tokens, device=device),
        )

    def _note(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.runs[module] = ModuleRun(
            tuple(map(_kept, args)), dict(kwargs), _kept(output), args[0] if args else None
        )


def check_equal(
    actual: Tensor,
    expected: Any,
    what: str,
    *,
    base: Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    """Raise `NotFusable` if `actual` differs from `expected` by more than rounding explains.

    With `base` the two are judged by what was added to it, whose own rounding is allowed for.
    `tolerance` takes the place of the dtype's.
    """
    if not isinstance(expected, Tensor) or actual.shape != expected.shape:
        raise NotFusable(f"{what} gives more than a tensor")
    if actual.dtype != expected.dtype:
        raise NotFusable(f"{what} gives {expected.dtype}".replace("torch.", ""))
    unit = torch.finfo(expected.dtype).eps
    is_half = expected.dtype in HALF_DTYPES
    if tolerance is None:
        tolerance = _ROUNDINGS * unit if is_half else TOLERANCE
    start = torch.zeros_like(expected) if base is None else base
    wanted, got = expected.double() - start.double(), actual.double() - start.double()
    size = _root_mean_square(wanted)
    allowed = tolerance * size
    if base is not None:
        allowed += unit * _root_mean_square(expected.double())
    error = _root_mean_square(got - wanted)
    slope = float((wanted * (got - wanted)).mean()) / max(size, math.ulp(0.0))
    # Not a number is no small difference.
    if not (error <= allowed and abs(slope) <= (_LARGEST_SLOPE if is_half else 1.0) * allowed):
        raise NotFusable(f"{what} differs by {error / max(size, math.ulp(0.0)):.1g} of its output")


def check_roundings(actual: Tensor, expected: Any, what: str) -> None:
    """As `check_equal`; in half precision almost every value has to be the expected one.

    For steps that round in a certain order, after which nothing tells the order any more.
    """
    check_equal(actual, expected, what)
    if expected.dtype in HALF_DTYPES:
        share = other_roundings(actual, expected)
        if share > MOST_OTHER_ROUNDINGS:
            raise NotFusable(f"{what} is rounded otherwise in {share:.0%} of its values")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference as a share of the expected one's."""
    size = _root_mean_square(expected.double())
    return _root_mean_square(actual.double() - expected.double()) / max(size, math.ulp(0.0))


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
