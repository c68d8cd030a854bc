"""Makes a model on a GPU give a row the same bits whatever rows run beside it.

Libraries choose how a product or a mean is summed by the number of rows. Linear layers and RMS
norms are replaced by kernels that do not, each after a comparison with the original. Then one step
is watched: every operation that is left must treat tokens apart, else the model is refused by the
name of the module. At last a row is computed alone, among others and in other chunks, and its
logits must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cbatch_kernels.layers import rms_norm
from cbatch_kernels.matmul import linear
from cbatch_kernels.tiles import MatmulTiles, matmul_tiles
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch_cli.attention.backend import build_attention_backend
from cbatch_cli.attention.triton_backend import describe_device
from cbatch_cli.errors import ModelError, UsageError
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.models.packed_step import layer_caches, step_metadata

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_NUM_PROBED_ROWS = 3
_BLOCK_SIZE = 16
_ROW_LEN, _NEIGHBOUR_LEN = 21, 40

# Operations that move, make or repeat values; those that compute element by element have a tag.
_MOVES = frozenset(
    {
        *("arange", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "expand", "fill_"),
        *("full", "full_like", "gather", "index", "index_select", "lift_fresh", "linspace"),
        *("masked_fill", "masked_fill_", "ones", "ones_like", "repeat", "scalar_tensor", "split"),
        *("stack", "take_along_dim", "to", "tril", "triu", "unbind", "where", "zero_", "zeros"),
        *("zeros_like", "_to_copy", "_unsafe_view", "contiguous", "empty", "empty_like"),
        *("empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("alias_copy", "item", "_local_scalar_dense", "is_same_size", "set_", "resize_"),
    }
)
_PRODUCTS = frozenset({"mm", "bmm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class InvarianceReport:
    """What was replaced so that a row's bits do not depend on its neighbours."""

    num_linears: int
    num_norms: int

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return {"num_linears": self.num_linears, "num_norms": self.num_norms}


@torch.inference_mode()
def make_batch_invariant(model: HFModel) -> InvarianceReport:
    """Replace the linear layers and norms of `model` in place, and check that it suffices.

    Bind a backend afterwards. Raises `UsageError` for attention other than Triton's, `ModelError`
    naming the module of a model that computes something else across tokens.
    """
    if model.attention_backend != "triton":
        raise UsageError(
            f"--deterministic needs Triton's attention on a GPU, not {model.attention_backend}"
        )
    arch, _ = describe_device(model.device)
    num_linears = num_norms = 0
    for module in model.module.modules():
        if type(module) is nn.Linear and module.weight.dtype in _TOLERANCES:
            num_linears += _replace(module, InvariantLinear(module, arch), module.in_features)
        elif _may_be_norm(module):
            # Gemma's norms multiply by 1 + weight, and Llama's round before they multiply.
            num_norms += any(
                _replace(
                    module,
                    InvariantNorm(module, round_before_weight=rounds, weight_offset=offset),
                    module.weight.shape[0],
                )
                for rounds, offset in ((True, 0.0), (False, 1.0), (False, 0.0))
            )
    try:
        _require_tokens_apart(model)
        _require_same_bits(model)
    finally:
        model.unbind()
    return InvarianceReport(num_linears=num_linears, num_norms=num_norms)


class InvariantLinear:
    """In place of the `forward` of a linear layer."""

    def __init__(self, module: nn.Linear, arch: str) -> None:
        self._module = module
        self._tiles: MatmulTiles = matmul_tiles(arch, module.weight.dtype)

    def __call__(self, input: Tensor) -> Tensor:
        """States `[..., in_features]` to `[..., out_features]`."""
        weight, bias = self._module.weight, self._module.bias
        states = input.reshape(-1, weight.shape[1]).contiguous()
        output = states.new_empty(states.shape[0], weight.shape[0])
        linear(states, weight, output, bias=bias, tiles=self._tiles)
        return output.view(*input.shape[:-1], weight.shape[0])


class InvariantNorm:
    """In place of the `forward` of an RMS norm."""

    def __init__(
        self, module: nn.Module, *, round_before_weight: bool, weight_offset: float
    ) -> None:
        self._module = module
        self._epsilon = _epsilon(module)
        self._round_before_weight = round_before_weight
        self._weight_offset = weight_offset

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """States `[..., D]` normed over their last dimension."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        rms_norm(
            rows,
            self._module.weight,
            output,
            eps=self._epsilon,
            round_before_weight=self._round_before_weight,
            weight_offset=self._weight_offset,
        )
        return output.view(hidden_states.shape)


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and parameters["weight"].dtype in _TOLERANCES
        and _epsilon(module) > 0
    )


def _epsilon(module: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return 0.0


def _replace(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> bool:
    """Whether `forward` gives what the module gives, and so has taken its place."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(1, _NUM_PROBED_ROWS, width, generator=generator)
    probe = probe.to(device=weight.device, dtype=weight.dtype)
    try:
        expected, actual = module(probe), forward(probe)
    except (TypeError, RuntimeError, ValueError):
        return False  # it wants more than hidden states
    if not isinstance(expected, Tensor) or expected.shape != actual.shape:
        return False
    difference = (actual - expected).float().norm() / expected.float().norm()
    # Not a number is no small difference.
    if not float(difference) <= _TOLERANCES[weight.dtype]:
        return False
    module.forward = forward
    return True


def _require_tokens_apart(model: HFModel) -> None:
    """Raise `ModelError` for an operation of a step that may mix the sums of tokens."""
    lengths = (_NEIGHBOUR_LEN, _ROW_LEN)
    watch = _Watch()
    with watch.modules_of(model.module), watch:
        _step_logits(model, [[(0, lengths[0])], [(0, lengths[1])]])
    for name, operation in watch.found:
        kind = type(model.module.get_submodule(name)).__name__
        raise ModelError(
            f"--deterministic does not work on a GPU with models of type {model.model_type}: "
            f"{name or 'the model'} ({kind}) computes {operation}, whose bits may depend on the "
            "other rows"
        )


def _require_same_bits(model: HFModel) -> None:
    """Raise `ModelError` if the logits of a row change with its neighbours or its chunks."""
    alone = _step_logits(model, [[(0, _ROW_LEN)]])[-1]
    ways = {
        "beside another row": [[(0, _ROW_LEN)], [(0, _NEIGHBOUR_LEN)]],
        "in chunks": [[(0, 13), (13, _ROW_LEN - 1), (_ROW_LEN - 1, _ROW_LEN)]],
        "in chunks beside another row": [
            [(0, 1), (1, 18), (18, _ROW_LEN)],
            [(0, 30), (30, 39), (39, 40)],
        ],
    }
    for way, parts in ways.items():
        if not torch.equal(_step_logits(model, parts)[0], alone):
            raise ModelError(
                f"--deterministic does not work with models of type {model.model_type} on "
                f"{model.device}: a row's logits have other bits {way}"
            )


def _step_logits(model: HFModel, rows: list[list[tuple[int, int]]]) -> Tensor:
    """Logits `[rows, vocab]` of the rows' last tokens; each is computed in the ranges given."""
    longest = max(parts[-1][1] for parts in rows)
    num_blocks = -(-longest // _BLOCK_SIZE)
    tables = torch.arange(len(rows) * num_blocks, dtype=torch.int32).view(len(rows), -1)
    backend = build_attention_backend(
        "triton",
        model.layer_specs,
        layer_caches(model, num_blocks=tables.numel(), block_size=_BLOCK_SIZE, value=0.0),
        _BLOCK_SIZE,
        max_num_seqs=len(rows),
        max_model_len=longest,
        deterministic=True,
    )
    model.bind(backend)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.vocab_size, (len(rows), longest), generator=generator)
    logits = torch.empty(0)
    for step in zip(*rows, strict=True):
        parts = sorted(
            ((row, torch.arange(*part)) for row, part in enumerate(step)),
            key=lambda part: len(part[1]) > 1,  # decodes first
        )
        backend.begin_step([step_metadata(parts, tables, _BLOCK_SIZE, model.device)])
        ends = torch.tensor([len(positions) for _, positions in parts]).cumsum(0) - 1
        packed = model.forward(
            torch.cat([token_ids[row, positions] for row, positions in parts]).to(model.device),
            torch.cat([positions for _, positions in parts]).to(model.device),
            ends.to(model.device),
        )
        order = torch.tensor([row for row, _ in parts]).argsort()
        logits = packed[order.to(packed.device)]
    return logits


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that are neither element by element nor mere moves, by module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, str]] = []
        """(name of the module, name of the operation), in order."""
        self._running: list[str] = []

    @contextmanager
    def modules_of(self, model: nn.Module) -> Iterator[None]:
        """Know which module runs."""

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._running.append(name)

        def leave(*_: Any) -> None:
            self._running.pop()

        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # An operation that is made of others arrives here first, since no gradients are kept.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self._running and not _keeps_tokens_apart(func, args):
            self.found.append((self._running[-1], func.overloadpacket.__name__))
        return func(*args, **kwargs)


def _keeps_tokens_apart(func: Any, args: tuple[Any, ...]) -> bool:
    name = func.overloadpacket.__name__
    if name in _PRODUCTS:
        # With one summand there is no order of sums: rotations come about like that.
        return bool(args[0].shape[-1] == 1)
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    return torch.Tag.pointwise in func.tags or is_view or name in _MOVES
