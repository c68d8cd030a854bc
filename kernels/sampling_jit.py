"""Triton code of the sampling helpers; imports triton, so import it only to launch.

Noise: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

import triton
import triton.language as tl


@triton.jit
def scale_logits_kernel(
    logits,
    temperature,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    output_counts,
    in_prompt,
    slots,
    logits_stride,
    counts_stride,
    prompt_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """Grid (rows, blocks of the vocabulary); in place."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < VOCAB_SIZE
    logits_ptrs = logits + row * logits_stride + tokens
    x = tl.load(logits_ptrs, mask=mask, other=0.0)
    if HAS_PENALTIES:
        slot = tl.load(slots + row)
        count = tl.load(output_counts + slot * counts_stride + tokens, mask=mask, other=0)
        prompted = tl.load(in_prompt + slot * prompt_stride + tokens, mask=mask, other=0)
        repetition = tl.load(repetition_penalty + row)
        penalised = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where((count > 0) | (prompted > 0), penalised, x)
        x -= tl.load(frequency_penalty + row) * count.to(tl.float32)
        x -= tl.where(count > 0, tl.load(presence_penalty + row), 0.0)
    heat = tl.load(temperature + row)
    x = tl.where(heat > 0.0, x / tl.where(heat > 0.0, heat, 1.0), x)
    tl.store(logits_ptrs, x, mask=mask)


@triton.jit
def _ordered_bits(x):
    """Unsigned numbers in the order of the floats."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _float_of(ordered):
    bits = tl.where(ordered >= 0x80000000, ordered & 0x7FFFFFFF, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def filter_thresholds_kernel(
    thresholds,
    logits,
    top_k,
    top_p,
    min_p,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
    WAY_BITS: tl.constexpr,
):
    """Grid (rows,). Each pass over the row settles `WAY_BITS` more bits of the threshold."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    lanes = tl.arange(0, BLOCK)
    ways = tl.arange(0, WAYS).to(tl.uint32)
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        tokens = start + lanes
        x = tl.load(logits_row + tokens, mask=tokens < VOCAB_SIZE, other=-float("inf"))
        lane_max = tl.maximum(lane_max, x)
    row_max = tl.max(lane_max, 0)
    threshold = tl.full([1], -float("inf"), tl.float32)

    k = tl.load(top_k + row)
    if (k > 0) & (k < VOCAB_SIZE):
        found = tl.zeros([1], tl.uint32)
        for digit in range(32 // WAY_BITS):
            shift = 32 - WAY_BITS - WAY_BITS * digit
            candidates = found + (ways << shift)
            counts = tl.zeros([WAYS], tl.int32)
            for start in range(0, VOCAB_SIZE, BLOCK):
                tokens = start + lanes
                mask = tokens < VOCAB_SIZE
                x = tl.load(logits_row + tokens, mask=mask, other=-float("inf"))
                reached = (_ordered_bits(x)[None, :] >= candidates[:, None]) & mask[None, :]
                counts += tl.sum(reached.to(tl.int32), axis=1)
            # Counts fall from one candidate to the next; the last that holds k tokens is it.
            best = tl.sum((counts >= k).to(tl.int32), axis=0) - 1
            found += best.to(tl.uint32) << shift
        threshold = _float_of(found)

    p = tl.load(top_p + row)
    if p < 1.0:
        found = tl.zeros([1], tl.uint32)
        wanted = 0.0
        for digit in range(32 // WAY_BITS):
            shift = 32 - WAY_BITS - WAY_BITS * digit
            candidates = found + (ways << shift)
            masses = tl.zeros([WAYS], tl.float32)
            for start in range(0, VOCAB_SIZE, BLOCK):
                tokens = start + lanes
                x = tl.load(logits_row + tokens, mask=tokens < VOCAB_SIZE, other=-float("inf"))
                weights = tl.where(x >= threshold, tl.exp(x - row_max), 0.0)
                reached = _ordered_bits(x)[None, :] >= candidates[:, None]
                masses += tl.sum(tl.where(reached, weights[None, :], 0.0), axis=1)
            if digit == 0:
                # The first candidate of the first pass lets every token through.
                wanted = p * tl.sum(tl.where(ways == 0, masses, 0.0), axis=0)
            best = tl.sum((masses >= wanted).to(tl.int32), axis=0) - 1
            found += best.to(tl.uint32) << shift
        threshold = tl.maximum(threshold, _float_of(found))

    least = tl.load(min_p + row)
    if least > 0.0:
        threshold = tl.maximum(threshold, row_max + tl.log(least))
    tl.store(thresholds + row + tl.arange(0, 1), threshold)


@triton.jit
def _gumbel(word):
    """-log(-log(1 - v)) for v uniform in (0, 1), from 32 random bits.

    The tokens that win have a small v, so that is where 1 - v must not be rounded.
    """
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - tl.minimum(v, 0.99999994)))
    return -tl.log(exponential)


@triton.jit
def gumbel_argmax_kernel(
    token_ids,
    logits,
    temperature,
    thresholds,
    seeds,
    rows,
    samples,
    positions,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). Token t takes word t % 4 of counter t // 4 of the row's own generator."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits + row * logits_stride
    threshold = tl.load(thresholds + row)
    is_random = tl.load(temperature + row) > 0.0
    input_row = tl.load(rows + row).to(tl.uint64)
    word0, word1, word2, word3 = tl.philox(
        tl.load(seeds + row),
        tl.load(positions + row).to(tl.uint32),
        tl.load(samples + row).to(tl.uint32),
        input_row.to(tl.uint32),
        (input_row >> 32).to(tl.uint32),
    )
    seed = (word1.to(tl.uint64) << 32) | word0.to(tl.uint64)

    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    num_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB_SIZE, 4 * BLOCK):
        counters = start // 4 + lanes
        noise0, noise1, noise2, noise3 = tl.philox(
            seed, counters.to(tl.uint32), word2, word3, tl.zeros([BLOCK], tl.uint32)
        )
        for word in tl.static_range(4):
            tokens = counters * 4 + word
            mask = tokens < VOCAB_SIZE
            x = tl.load(logits_row + tokens, mask=mask, other=-float("inf"))
            if word == 0:
                bits = noise0
            elif word == 1:
                bits = noise1
            elif word == 2:
                bits = noise2
            else:
                bits = noise3
            score = tl.where(is_random, x + _gumbel(bits), x)
            score = tl.where(mask & (x >= threshold), score, -float("inf"))
            best_token = tl.where(score > best, tokens, best_token)
            best = tl.where(score > best, score, best)
            highest = tl.where(x > highest, x, highest)
            num_nan += (x != x).to(tl.int32)

    # Of equal scores the first token of the vocabulary wins, as in torch.
    winner = tl.min(tl.where(best == tl.max(best, 0), best_token, VOCAB_SIZE), 0)
    row_max = tl.max(highest, 0)
    means_nothing = (
        (tl.sum(num_nan, 0) > 0) | (row_max == -float("inf")) | (row_max == float("inf"))
    )
    tl.store(token_ids + row, tl.where(means_nothing, -1, winner).to(tl.int64))
