"""The Triton kernels on a device: how far from float64 they are, and how fast attention is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from cbatch_kernels import reference
from cbatch_kernels.layers import act_and_mul, rms_norm, rope
from cbatch_kernels.matmul import linear
from cbatch_kernels.tiles import matmul_tiles
from torch import Tensor

from cbatch_cli.attention.cache_dtype import choose_cache_dtype, is_fp8
from cbatch_cli.attention.metadata import AttentionMetadata, KVScales, LayerSpec
from cbatch_cli.attention.triton_backend import TritonAttentionBackend, describe_device
from cbatch_cli.bench.device_clock import seconds_of
from cbatch_cli.bench.suite import Measurement
from cbatch_cli.errors import UsageError

BLOCK_SIZE = 16

# Relative root mean square error against float64 that rounding explains.
_TOLERANCES = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_SCALES = KVScales(k=0.5, v=0.125)
_MIXED = ((300, 1), (17, 1), (0, 1), (70, 20), (0, 33))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """The shape of an attention layer."""

    num_kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128
    sliding_window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False


class AttentionStep:
    """One layer's attention over rows given as (positions cached before, new positions)."""

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        sizes: AttentionSizes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        kv_dtype = kv_dtype or dtype
        kv_heads, head_dim = sizes.num_kv_heads, sizes.head_dim
        self.layer = LayerSpec(
            index=0,
            num_heads=kv_heads * sizes.group_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            sliding_window=sizes.sliding_window,
        )
        self.scales = _SCALES if is_fp8(kv_dtype) else KVScales()
        self.softcap = sizes.softcap
        self.sinks = random(self.layer.num_heads) if sizes.with_sinks else None
        query_lens = tuple(new for _, new in lengths)
        seq_lens = tuple(cached + new for cached, new in lengths)
        num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
        pool = torch.randperm(sum(num_blocks), generator=generator).int()
        self.tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
        for row, blocks in enumerate(torch.split(pool, num_blocks)):
            self.tables[row, : len(blocks)] = blocks
        slots = [
            self.tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
            for row, (cached, new) in enumerate(lengths)
            for positions in [torch.arange(cached, cached + new)]
        ]
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.metadata = AttentionMetadata(
            query_start_loc=starts.to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=self.tables.to(device),
            slot_mapping=torch.cat(slots).to(device),
            num_decodes=query_lens.count(1),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
        )
        shape = (len(pool), BLOCK_SIZE, kv_heads, head_dim)
        self.k_cache, self.v_cache = (
            (torch.randn(shape, device=device) / scale).to(kv_dtype)
            for scale in (self.scales.k, self.scales.v)
        )
        num_tokens = sum(query_lens)
        self.query = random(num_tokens, self.layer.num_heads, head_dim)
        self.key, self.value = (
            random(num_tokens, kv_heads, head_dim),
            random(num_tokens, kv_heads, head_dim),
        )
        self._backend = TritonAttentionBackend(
            [self.layer],
            [(self.k_cache, self.v_cache)],
            BLOCK_SIZE,
            max_num_seqs=len(lengths),
            max_model_len=max(seq_lens),
            deterministic=deterministic,
            kv_scales={0: self.scales},
        )
        self._backend.begin_step([self.metadata])

    def run(self) -> Tensor:
        """Store the new keys and values, and attend: `[T, H, D]`."""
        return self._backend.forward(
            self.layer,
            self.query,
            self.key,
            self.value,
            scale=self.layer.head_dim**-0.5,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def expected(self) -> Tensor:
        """The same in float64 on the CPU, over the caches as they are."""
        k_cache, v_cache = (c.cpu().to(torch.float64) for c in (self.k_cache, self.v_cache))
        expected: Tensor = reference.paged_attention(
            self.query.cpu().double(),
            k_cache,
            v_cache,
            self.tables,
            self.metadata.query_start_loc.cpu(),
            self.metadata.seq_lens.cpu(),
            scale=self.layer.head_dim**-0.5,
            sliding_window=self.layer.sliding_window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.cpu().double(),
            k_scale=self.scales.k,
            v_scale=self.scales.v,
        )
        return expected

    @property
    def num_bytes(self) -> int:
        """Keys and values that a step of decodes has to read."""
        per_position = 2 * self.layer.num_kv_heads * self.layer.head_dim
        return sum(self.metadata.seq_lens_cpu) * per_position * self.k_cache.element_size()

    @property
    def num_flops(self) -> int:
        """Multiplications and additions of the products of a causal step."""
        pairs = sum(
            new * (length - new) + new * (new + 1) // 2
            for new, length in zip(
                self.metadata.query_lens_cpu, self.metadata.seq_lens_cpu, strict=True
            )
        )
        return 4 * pairs * self.layer.num_heads * self.layer.head_dim


def kernel_errors(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    *,
    head_dims: Sequence[int],
    lengths: Sequence[tuple[int, int]] = _MIXED,
) -> Iterator[Measurement]:
    """Each kernel's relative error against float64, in every dtype and KV dtype of the device.

    `lengths` are the rows that attend: positions cached before, new positions; decodes first.
    """
    for dtype in dtypes:
        for head_dim in head_dims:
            for features in (False, True):
                sizes = AttentionSizes(
                    num_kv_heads=2,
                    head_dim=head_dim,
                    sliding_window=40 if features else None,
                    softcap=20.0 if features else None,
                    with_sinks=features,
                )
                for kv_dtype in (dtype, *_fp8_dtypes(device)):
                    name = f"attention {head_dim} {_short(dtype)}, KV {_short(kv_dtype)}"
                    step = AttentionStep(
                        lengths, sizes, device=device, dtype=dtype, kv_dtype=kv_dtype
                    )
                    actual = step.run()
                    suffix = ", window, cap, sinks" if features else ""
                    yield _error(name + suffix, actual, step.expected())
        yield from _layer_errors(device, dtype)


def decode_rate(
    sizes: AttentionSizes,
    *,
    device: torch.device,
    num_seqs: int,
    context_len: int,
    dtype: torch.dtype,
    num_calls: int = 10,
) -> float:
    """Bytes of keys and values per second that decodes read."""
    step = AttentionStep([(context_len - 1, 1)] * num_seqs, sizes, device=device, dtype=dtype)
    return step.num_bytes / seconds_of(step.run, device, num_calls=num_calls)


def prefill_rate(
    sizes: AttentionSizes,
    *,
    device: torch.device,
    prompt_len: int,
    dtype: torch.dtype,
    num_calls: int = 10,
) -> float:
    """Floating-point operations per second of a prompt's attention."""
    step = AttentionStep([(0, prompt_len)], sizes, device=device, dtype=dtype)
    return step.num_flops / seconds_of(step.run, device, num_calls=num_calls)


def _layer_errors(device: torch.device, dtype: torch.dtype) -> Iterator[Measurement]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    def exact(tensor: Tensor) -> Tensor:
        return tensor.cpu().double()

    states, weight, bias = random(37, 192), random(72, 192), random(72)
    output = random(37, 72)
    arch, _ = describe_device(device)
    linear(states, weight, output, bias=bias, tiles=matmul_tiles(arch, dtype))
    expected = reference.linear(exact(states), exact(weight), bias=exact(bias))
    yield _error(f"linear {_short(dtype)}", output, expected)

    factor, normed = random(192), torch.empty_like(states)
    rms_norm(states, factor, normed, eps=1e-6, round_before_weight=True)
    expected = reference.rms_norm(
        exact(states), exact(factor), eps=1e-6, round_before_weight=True, dtype=dtype
    )
    yield _error(f"norm {_short(dtype)}", normed, expected)

    query, key, angles = random(37, 4, 64), random(37, 2, 64), torch.randn(37, 32)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    expected = reference.rope(exact(query), exact(cos), exact(sin))
    rope(query, key, cos, sin)
    yield _error(f"rope {_short(dtype)}", query, expected)

    gated = torch.empty_like(states)
    act_and_mul(states, states, gated, activation="silu")
    expected = reference.act_and_mul(exact(states), exact(states), activation="silu", dtype=dtype)
    yield _error(f"activation {_short(dtype)}", gated, expected)


def _error(name: str, actual: Tensor, expected: Tensor) -> Measurement:
    difference = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    return Measurement(
        name=name,
        value=float(difference),
        unit="relative error",
        target=_TOLERANCES[actual.dtype],
        at_most=True,
    )


def _fp8_dtypes(device: torch.device) -> list[torch.dtype]:
    found = []
    for name in ("fp8_e4m3", "fp8_e5m2"):
        choose: Callable[..., torch.dtype] = choose_cache_dtype
        try:
            found.append(choose(name, "triton", dtype=torch.bfloat16, device=device))
        except UsageError:
            continue  # the card does not have it
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
