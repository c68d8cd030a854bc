"""Choosing tokens on the device: penalties, filters without a sort, and noise by counter."""

from __future__ import annotations

import torch
from cbatch_kernels.checks import Shapes, check_dtype
from cbatch_kernels.tiles import COMPILE_OPTIONS, next_power_of_2
from torch import Tensor

_MAX_BLOCK = 1024
_WAY_BITS = 4


def scale_logits(
    logits: Tensor,
    temperature: Tensor,
    *,
    repetition_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    output_counts: Tensor | None = None,
    in_prompt: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Apply penalties, then temperature, to float32 logits `[N, V]` in place.

    All parameters are float32 `[N]`; a temperature of 0 leaves the row as it is. Penalties are
    given all or not at all, with `output_counts` int32 `[P, V]`, how often each token was made,
    and `in_prompt` bool `[P, V]`, whether it was given, of P slots, and `slots` int64 `[N]`, which
    slot each row belongs to. The repetition penalty divides positive logits of tokens that were
    made or given and multiplies negative ones; frequency is subtracted per time a token was made,
    presence once. Raises `ValueError` for a tensor that does not fit.
    """
    shapes = Shapes()
    shapes.check("logits", logits, "N V")
    shapes.check("temperature", temperature, "N")
    check_dtype("logits", logits, (torch.float32,))
    check_dtype("temperature", temperature, (torch.float32,))
    given = {
        "repetition_penalty": (repetition_penalty, "N", torch.float32),
        "frequency_penalty": (frequency_penalty, "N", torch.float32),
        "presence_penalty": (presence_penalty, "N", torch.float32),
        "output_counts": (output_counts, "P V", torch.int32),
        "in_prompt": (in_prompt, "P V", torch.bool),
        "slots": (slots, "N", torch.int64),
    }
    absent = [name for name, (tensor, _, _) in given.items() if tensor is None]
    if absent and len(absent) < len(given):
        raise ValueError(f"penalties need {', '.join(given)}; {', '.join(absent)} is missing")
    for name, (tensor, layout, dtype) in given.items():
        if tensor is not None:
            shapes.check(name, tensor, layout)
            check_dtype(name, tensor, (dtype,))
    if logits.numel() == 0:
        return
    from cbatch_kernels.sampling_jit import scale_logits_kernel

    block = min(_MAX_BLOCK, next_power_of_2(shapes["V"]))
    scale_logits_kernel[shapes["N"], -(-shapes["V"] // block)](
        logits,
        temperature,
        temperature if repetition_penalty is None else repetition_penalty,
        temperature if frequency_penalty is None else frequency_penalty,
        temperature if presence_penalty is None else presence_penalty,
        logits if output_counts is None else output_counts,
        logits if in_prompt is None else in_prompt.view(torch.uint8),
        logits if slots is None else slots,
        logits.stride(0),
        0 if output_counts is None else output_counts.stride(0),
        0 if in_prompt is None else in_prompt.stride(0),
        VOCAB_SIZE=shapes["V"],
        BLOCK=block,
        HAS_PENALTIES=not absent,
        **COMPILE_OPTIONS,
    )


def filter_thresholds(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, thresholds: Tensor
) -> None:
    """Write to `thresholds` `[N]` the least logit that top_k, then top_p, then min_p keep.

    `logits` is float32 `[N, V]`, after temperature; `top_k` int32 `[N]`, 0 for all; `top_p` and
    `min_p` float32 `[N]`, 1 and 0 for all. Tokens of equal logits are kept or dropped together.
    Found by narrowing down its bits, so that nothing is sorted. Raises `ValueError` for a tensor
    that does not fit.
    """
    shapes = Shapes()
    shapes.check("logits", logits, "N V")
    for name, tensor in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        shapes.check(name, tensor, "N")
        check_dtype(name, tensor, (torch.int32 if name == "top_k" else torch.float32,))
    shapes.check("thresholds", thresholds, "N")
    check_dtype("logits", logits, (torch.float32,))
    check_dtype("thresholds", thresholds, (torch.float32,))
    if logits.numel() == 0:
        return
    from cbatch_kernels.sampling_jit import filter_thresholds_kernel

    filter_thresholds_kernel[(shapes["N"],)](
        thresholds,
        logits,
        top_k,
        top_p,
        min_p,
        logits.stride(0),
        VOCAB_SIZE=shapes["V"],
        BLOCK=min(_MAX_BLOCK, next_power_of_2(shapes["V"])),
        WAYS=1 << _WAY_BITS,
        WAY_BITS=_WAY_BITS,
        num_warps=8,
        **COMPILE_OPTIONS,
    )


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    thresholds: Tensor,
    token_ids: Tensor,
    *,
    seeds: Tensor,
    rows: Tensor,
    samples: Tensor,
    positions: Tensor,
) -> None:
    """Write to `token_ids` int64 `[N]` one token drawn from each row of float32 logits `[N, V]`.

    Logits are after temperature; those below `thresholds` float32 `[N]` are out. A row of
    `temperature` 0 takes its highest logit. The noise is a function of `seeds`, `rows`, `samples`
    and `positions`, all int64 `[N]`, and of the token, so that neighbours do not matter. A row
    that holds NaN, +inf, or nothing but -inf gets -1. Raises `ValueError` for a tensor that does
    not fit.
    """
    shapes = Shapes()
    shapes.check("logits", logits, "N V")
    check_dtype("logits", logits, (torch.float32,))
    for name, tensor in (("temperature", temperature), ("thresholds", thresholds)):
        shapes.check(name, tensor, "N")
        check_dtype(name, tensor, (torch.float32,))
    identity = {"seeds": seeds, "rows": rows, "samples": samples, "positions": positions}
    for name, tensor in {"token_ids": token_ids, **identity}.items():
        shapes.check(name, tensor, "N")
        check_dtype(name, tensor, (torch.int64,))
    if logits.numel() == 0:
        return
    from cbatch_kernels.sampling_jit import gumbel_argmax_kernel

    gumbel_argmax_kernel[(shapes["N"],)](
        token_ids,
        logits,
        temperature,
        thresholds,
        seeds,
        rows,
        samples,
        positions,
        logits.stride(0),
        VOCAB_SIZE=shapes["V"],
        BLOCK=min(_MAX_BLOCK, next_power_of_2(-(-shapes["V"] // 4))),
        num_warps=8,
        **COMPILE_OPTIONS,
    )
