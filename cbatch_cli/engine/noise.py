"""Counter-based sampling noise: a pure function of who samples, never of who runs beside it.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds of Philox4x32.

    `counter` is `[N, 4]` and `key` `[N, 2]`, 32-bit words in uint64; returns `[N, 4]` likewise.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    *,
    seeds: NDArray[np.uint64],
    rows: NDArray[np.int64],
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, row, sample, position); all arguments are `[N]`.

    `position` is the place of the sampled token in the sequence, prompt included.
    """
    row_words = rows.astype(np.uint64)
    counter = np.stack(
        [
            positions.astype(np.uint64) & _LOW,
            samples.astype(np.uint64) & _LOW,
            row_words & _LOW,
            row_words >> _SHIFT,
        ],
        axis=1,
    )
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=1)
    words = philox4x32(counter, key)
    # 53 bits: 32 of the first word, 21 of the second.
    mantissa = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return mantissa.astype(np.float64) * 2.0**-53
