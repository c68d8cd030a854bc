"""Bugs that the tests must find: each is one change to the text of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` wherever it stands in the module `cbatch_kernels.<module>`."""

    name: str
    module: str
    old: str
    new: str


ATTENTION = "paged_attention_jit"
STORE = "kv_store_jit"
MATMUL = "matmul_jit"

MUTANTS = (
    Mutant(
        "window starts one key late",
        ATTENTION,
        "keys[None, :] > positions[:, None] - window",
        "keys[None, :] > positions[:, None] - window + 1",
    ),
    Mutant(
        "window starts one key early",
        ATTENTION,
        "keys[None, :] > positions[:, None] - window",
        "keys[None, :] >= positions[:, None] - window",
    ),
    Mutant(
        "a query does not see itself",
        ATTENTION,
        "visible = keys[None, :] <= positions[:, None]",
        "visible = keys[None, :] < positions[:, None]",
    ),
    Mutant(
        "a query sees the key after it",
        ATTENTION,
        "visible = keys[None, :] <= positions[:, None]",
        "visible = keys[None, :] <= positions[:, None] + 1",
    ),
    Mutant(
        "keys before the window are read",
        ATTENTION,
        "readable &= keys >= first_key",
        "readable &= keys >= first_key - 1",
    ),
    Mutant(
        "the tile at the start of a prefill window is skipped",
        ATTENTION,
        "begin = first_key // BLOCK_N * BLOCK_N",
        "begin = tl.cdiv(first_key, BLOCK_N) * BLOCK_N",
    ),
    Mutant(
        "one tile too few is masked at the start of a window",
        ATTENTION,
        "tl.cdiv(tl.maximum(key_end - window, 0), BLOCK_N) * BLOCK_N",
        "tl.maximum(key_end - window, 0) // BLOCK_N * BLOCK_N",
    ),
    Mutant(
        "the tile edge of the unmasked middle is one tile late",
        ATTENTION,
        "tl.maximum(middle, (first_position + 1) // BLOCK_N * BLOCK_N)",
        "tl.maximum(middle, tl.cdiv(first_position + 1, BLOCK_N) * BLOCK_N)",
    ),
    Mutant(
        "queries of the next block of queries are taken too",
        ATTENTION,
        "row_mask = (rows < BLOCK_Q * GROUP_SIZE) & (query_index < query_len)",
        "row_mask = query_index <= query_len",
    ),
    Mutant(
        "the last block of queries is dropped",
        ATTENTION,
        "if first_query >= query_len:",
        "if first_query + BLOCK_Q >= query_len + BLOCK_Q - 1:",
    ),
    Mutant(
        "no mask in the last tile",
        ATTENTION,
        "readable = keys < key_end",
        "readable = keys < key_end + BLOCK_N",
    ),
    Mutant(
        "block table read past the row",
        ATTENTION,
        "mask=readable, other=0).to(tl.int64)",
        "mask=keys < key_end + 2 * BLOCK_SIZE, other=0).to(tl.int64)",
    ),
    Mutant(
        "wrong KV head for a query head",
        ATTENTION,
        "heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE",
        "heads = kv_head + rows % GROUP_SIZE * tl.num_programs(1)",
    ),
    Mutant(
        "wrong KV head in decoding",
        ATTENTION,
        "heads = kv_head * GROUP_SIZE + rows\n",
        "heads = kv_head + rows * tl.num_programs(1)\n",
    ),
    Mutant(
        "even splits overlap by a tile",
        ATTENTION,
        "split_end = begin + tiles_per_split * BLOCK_N",
        "split_end = begin + tiles_per_split * BLOCK_N + BLOCK_N",
    ),
    Mutant(
        "fixed splits leave a gap of a tile",
        ATTENTION,
        "split_end = begin + SPLIT_SIZE",
        "split_end = begin + SPLIT_SIZE - BLOCK_N",
    ),
    Mutant(
        "an empty split says nothing",
        ATTENTION,
        'empty = tl.full([BLOCK_M], -float("inf"), tl.float32)',
        "empty = tl.zeros([BLOCK_M], tl.float32)",
    ),
    Mutant(
        "garbage of an empty split is multiplied",
        ATTENTION,
        "num_written = tl.where(weight > 0.0, VALUE_HEAD_DIM, 0)",
        "num_written = VALUE_HEAD_DIM",
    ),
    Mutant(
        "the sink is counted in every split",
        ATTENTION,
        "if HAS_SINKS and not IS_PARTIAL:",
        "if HAS_SINKS:",
    ),
    Mutant(
        "the sink is counted twice in a chunk",
        ATTENTION,
        "row_sum += 1.0",
        "row_sum += 2.0",
    ),
    Mutant(
        "the sink is left out of the reduction",
        ATTENTION,
        "total = tl.exp2(sink - shift)",
        "total = 0.0 * sink",
    ),
    Mutant(
        "lse without the sum",
        ATTENTION,
        "row_max + tl.log2(row_sum)",
        "row_max",
    ),
    Mutant(
        "-inf less -inf",
        ATTENTION,
        'shift = tl.where(new_max == -float("inf"), 0.0, new_max)',
        "shift = new_max",
    ),
    Mutant(
        "the running sum is not decayed",
        ATTENTION,
        "row_sum = row_sum * decay + tl.sum(weights, 1)",
        "row_sum = row_sum + tl.sum(weights, 1)",
    ),
    Mutant(
        "32-bit offset into the keys",
        ATTENTION,
        "k_rows = k_head + blocks * k_block_stride",
        "k_rows = k_head + (blocks * k_block_stride).to(tl.int32)",
    ),
    Mutant(
        "32-bit offset into the values",
        ATTENTION,
        "v_rows = v_head + blocks * v_block_stride",
        "v_rows = v_head + (blocks * v_block_stride).to(tl.int32)",
    ),
    Mutant(
        "32-bit offset in the KV write",
        STORE,
        "block * k_block_stride",
        "(block * k_block_stride).to(tl.int32)",
    ),
    Mutant(
        "scale of K for V",
        STORE,
        "_quantise(v, inverse_v_scale",
        "_quantise(v, inverse_k_scale",
    ),
    Mutant(
        "slot -1 written",
        STORE,
        "if slot < 0:",
        "if slot < -1:",
    ),
    Mutant(
        "a slot of the next block",
        STORE,
        "offset = slot % BLOCK_SIZE",
        "offset = (slot + 1) % BLOCK_SIZE",
    ),
    Mutant(
        "the last input features of a product are dropped",
        MATMUL,
        "range(0, IN_DIM, BLOCK_K)",
        "range(0, IN_DIM // BLOCK_K * BLOCK_K, BLOCK_K)",
    ),
    Mutant(
        "weights of the next output feature are multiplied",
        MATMUL,
        "feature_mask[None, :] & (inner < left)[:, None]",
        "feature_mask[None, :] & (inner <= left)[:, None]",
    ),
    Mutant(
        "states of rows that are not there are read",
        MATMUL,
        "row_mask[:, None] & (inner < left)[None, :]",
        "(inner < left)[None, :]",
    ),
    Mutant(
        "an output row too many is written",
        MATMUL,
        "row_mask = rows < num_rows",
        "row_mask = rows < num_rows + 1",
    ),
    Mutant(
        "the bias is that of the block before",
        MATMUL,
        "tl.load(bias + features, mask",
        "tl.load(bias + features % BLOCK_N, mask",
    ),
    Mutant(
        "32-bit offset into the weights of a product",
        MATMUL,
        "features = tl.program_id(1).to(tl.int64)",
        "features = tl.program_id(1)",
    ),
    Mutant(
        "a row is moved by the sum of its neighbours",
        MATMUL,
        "    if HAS_BIAS:",
        "    accumulator += tl.sum(accumulator, 0)[None, :] * 1e-7\n    if HAS_BIAS:",
    ),
)
