"""What an RMSNorm of a model computes, found by trying it on random rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Rows that are small enough for epsilon to matter are among them.
_ROW_SCALES = (1.0, 1e-3, 8.0)
_ROWS_PER_SCALE = 16
_LARGEST_EPSILON = 0.1
MOST_OTHER_ROUNDINGS = 0.02
"""Share of values that may be rounded otherwise in half precision, since sums in another order
differ a little. With the other casting order it is a tenth or more."""

NormStep = Callable[[Tensor], Tensor]


class NotFusable(Exception):
    """A part of a model is not built, or does not compute, as one of the kinds known here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A root-mean-square norm over the last dimension."""

    weight: Tensor
    """`[D]`, in the dtype and on the device of the model."""
    offset: float
    """What is added to the weight: 1 in Gemma's models."""
    epsilon: float
    rounds_before_weight: bool
    """Whether normed values are rounded to the model's dtype before the weight, as in Llama."""

    @property
    def factor(self) -> Tensor:
        """`[D]` float32: what the normed values are multiplied by."""
        return self.weight.float() + self.offset


def looks_like_norm(module: nn.Module) -> bool:
    """Whether `module` is called a norm, or has what one needs: a weight `[D]` and nothing else."""
    parameters = dict(module.named_parameters())
    if "norm" in type(module).__name__.lower() and next(module.children(), None) is None:
        return bool(parameters)
    has_only_weight = list(parameters) == ["weight"] and parameters["weight"].dim() == 1
    return has_only_weight and bool(_epsilons(module))


def read_norm(
    module: nn.Module, name: str, dtype: torch.dtype, make_step: Callable[[Norm], NormStep]
) -> Norm:
    """The norm that `module` is for rows of `dtype`, as `make_step` computes it.

    `name` is for the message. Raises `NotFusable` if it is no RMSNorm, or rounds otherwise than
    the two orders known here, or if the step rounds otherwise.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or len(list(module.parameters())) != 1:
        raise NotFusable(f"{name} is no RMSNorm")
    rows = _random_rows(weight.shape[0], dtype).to(weight.device)
    try:
        expected = module(rows)
    except (RuntimeError, TypeError, ValueError):
        raise NotFusable(f"{name} does not take rows alone") from None
    if not isinstance(expected, Tensor) or expected.dtype != dtype or expected.shape != rows.shape:
        raise NotFusable(f"{name} is no RMSNorm")
    candidates = [
        Norm(
            weight=weight.detach(),
            offset=offset,
            epsilon=epsilon,
            rounds_before_weight=rounds_before_weight,
        )
        for epsilon in _epsilons(module)
        for offset in (0.0, 1.0)
        for rounds_before_weight in (False, True)
    ]
    shares = [other_roundings(normed_rows(norm, rows), expected) for norm in candidates]
    if not shares or min(shares) > MOST_OTHER_ROUNDINGS:
        raise NotFusable(f"{name} is no RMSNorm")
    norm = candidates[shares.index(min(shares))]
    if other_roundings(make_step(norm)(rows), expected) > MOST_OTHER_ROUNDINGS:
        raise NotFusable(f"{name} is rounded otherwise than by the fused norm")
    return norm


def normed_rows(norm: Norm, rows: Tensor) -> Tensor:
    """What `norm` makes of rows `[..., D]`, as transformers' models write it."""
    values = rows.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounds_before_weight:
        values = values.to(rows.dtype).float()
    return (values * norm.factor).to(rows.dtype)


def other_roundings(actual: Tensor, expected: Tensor) -> float:
    """The share of values that are not the expected ones; 1 if any is far from it.

    In float32 the two casting orders are one, and what rounding does is no difference.
    """
    is_float32 = expected.dtype == torch.float32
    rtol = 1e-5 if is_float32 else 2 * torch.finfo(expected.dtype).eps
    if not torch.allclose(actual, expected, rtol=rtol, atol=1e-6):
        return 1.0
    return 0.0 if is_float32 else float((actual != expected).float().mean())


def _random_rows(dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(_ROW_SCALES), _ROWS_PER_SCALE, dim, generator=generator)
    return (rows * torch.tensor(_ROW_SCALES)[:, None, None]).flatten(0, 1).to(dtype)


def _epsilons(module: nn.Module) -> list[float]:
    """Numbers among the attributes of a module that could be its epsilon."""
    values = [value for value in vars(module).values() if type(value) is float]
    return list(dict.fromkeys(value for value in values if 0.0 < value <= _LARGEST_EPSILON))
