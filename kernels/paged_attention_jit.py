"""Triton code of paged attention; imports triton, so import it only to launch.

Online softmax after M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
2018; query tiles after T. Dao, "FlashAttention-2", 2023; split KV after T. Dao et al.,
"Flash-Decoding", 2023. Scores are kept in units of log2, so that weights are powers of two.
"""

import triton
import triton.language as tl


@triton.jit
def _attend_keys(
    accumulator,
    row_max,
    row_sum,
    query,
    positions,
    begin,
    end,
    first_key,
    key_end,
    window,
    block_table,
    k_head,
    v_head,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    score_scale,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_EDGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Add the tiles of keys from `begin` to `end` to the running softmax of every row.

    Every key from `begin` to `end` is seen by every row unless `IS_EDGE`: then only keys from
    `first_key` to `key_end` are read, and rows see what is not after them and in their window.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        keys = start + columns
        if IS_EDGE:
            readable = keys < key_end
            if HAS_WINDOW:
                readable &= keys >= first_key
        else:
            readable = columns < BLOCK_N
        blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
        slots = keys % BLOCK_SIZE

        k_rows = k_head + blocks * k_block_stride + slots * k_slot_stride
        k_mask = readable[None, :] & (dims < HEAD_DIM)[:, None]
        k = tl.load(k_rows[None, :] + dims[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(query, k.to(query.dtype), input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * cap_log2
        if IS_EDGE:
            visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if IS_EDGE:
            # A row may have seen no key so far; -inf less -inf would make it NaN.
            shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        v_rows = v_head + blocks * v_block_stride + slots * v_slot_stride
        v_mask = readable[:, None] & (value_dims < VALUE_HEAD_DIM)[None, :]
        v = tl.load(v_rows[:, None] + value_dims[None, :], mask=v_mask, other=0.0)
        accumulator = tl.dot(
            weights.to(query.dtype),
            v.to(query.dtype),
            accumulator * decay[:, None],
            input_precision="ieee",
        )
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=["window"])
def paged_prefill_kernel(
    output,
    query,
    k_cache,
    v_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    sinks,
    score_scale,
    cap_log2,
    value_scale,
    window,
    output_token_stride,
    output_head_stride,
    query_token_stride,
    query_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (blocks of queries of the longest chunk, KV heads, sequences).

    A row of the tile is one query of one head of the group: `BLOCK_M // GROUP_SIZE` queries.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    # The last queries have the most keys: they start first.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - query_start
    first_query = query_block * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + sequence)

    rows = tl.arange(0, BLOCK_M)
    query_index = first_query + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    row_mask = (rows < BLOCK_Q * GROUP_SIZE) & (query_index < query_len)
    tokens = (query_start + query_index).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    query_rows = query + tokens * query_token_stride + heads * query_head_stride
    q_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)

    first_position = seq_len - query_len + first_query
    positions = first_position + rows // GROUP_SIZE
    key_end = tl.minimum(first_position + BLOCK_Q, seq_len)
    first_key = 0
    begin = 0
    middle = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0)
        begin = first_key // BLOCK_N * BLOCK_N
        # From here on, the window of the last query hides nothing.
        middle = tl.cdiv(tl.maximum(key_end - window, 0), BLOCK_N) * BLOCK_N
    tail = tl.maximum(middle, (first_position + 1) // BLOCK_N * BLOCK_N)

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink is one more key of weight 1 at the start, whose value is zero.
        sink_scores = tl.load(sinks + heads, mask=row_mask, other=0.0).to(tl.float32)
        row_max = sink_scores * 1.4426950408889634
        row_sum += 1.0
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    if HAS_WINDOW:
        accumulator, row_max, row_sum = _attend_keys(
            accumulator, row_max, row_sum, q, positions, begin, middle, first_key, key_end, window,
            table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
            HAS_SOFTCAP, True, True,
        )  # fmt: skip
    accumulator, row_max, row_sum = _attend_keys(
        accumulator, row_max, row_sum, q, positions, middle, tail, first_key, key_end, window,
        table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
        HAS_SOFTCAP, False, False,
    )  # fmt: skip
    accumulator, row_max, row_sum = _attend_keys(
        accumulator, row_max, row_sum, q, positions, tail, key_end, first_key, key_end, window,
        table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
        HAS_SOFTCAP, True, False,
    )  # fmt: skip

    attended = accumulator / row_sum[:, None] * value_scale
    value_dims = tl.arange(0, BLOCK_DV)
    output_rows = output + tokens * output_token_stride + heads * output_head_stride
    o_mask = row_mask[:, None] & (value_dims < VALUE_HEAD_DIM)[None, :]
    output_ptrs = output_rows[:, None] + value_dims[None, :]
    tl.store(output_ptrs, attended.to(output.dtype.element_ty), mask=o_mask)


@triton.jit(do_not_specialize=["window"])
def paged_decode_split_kernel(
    output,
    lse,
    query,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    sinks,
    score_scale,
    cap_log2,
    value_scale,
    window,
    output_token_stride,
    output_head_stride,
    query_token_stride,
    query_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (sequences, KV heads, splits); every sequence has one query.

    With `SPLIT_SIZE` splits begin at multiples of it, whatever else is in the batch; 0 shares the
    keys out evenly. With `IS_PARTIAL` the output is float32 `[S, H, NS, Dv]`, to be merged by
    their `lse` `[S, H, NS]`; else there is one split, and the output is the attention's.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens + sequence)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - window, 0)
    first_tile = first_key // BLOCK_N * BLOCK_N
    if SPLIT_SIZE > 0:
        begin = (first_key // SPLIT_SIZE + split) * SPLIT_SIZE
        split_end = begin + SPLIT_SIZE
        begin = tl.maximum(begin, first_tile)
    else:
        tiles_per_split = tl.cdiv(tl.cdiv(seq_len - first_tile, BLOCK_N), num_splits)
        begin = first_tile + split * tiles_per_split * BLOCK_N
        split_end = begin + tiles_per_split * BLOCK_N
    key_end = tl.minimum(split_end, seq_len)

    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows
    value_dims = tl.arange(0, BLOCK_DV)
    o_mask = row_mask[:, None] & (value_dims < VALUE_HEAD_DIM)[None, :]
    num_heads = tl.num_programs(1) * GROUP_SIZE
    partial_rows = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
    if IS_PARTIAL:
        output_rows = output + partial_rows * VALUE_HEAD_DIM
    else:
        output_rows = (
            output + sequence.to(tl.int64) * output_token_stride + heads * output_head_stride
        )
    output_ptrs = output_rows[:, None] + value_dims[None, :]
    if begin >= key_end:
        if IS_PARTIAL:
            empty = tl.full([BLOCK_M], -float("inf"), tl.float32)
            tl.store(lse + partial_rows, empty, mask=row_mask)
        else:
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], output.dtype.element_ty)
            tl.store(output_ptrs, zeros, mask=o_mask)
        return

    dims = tl.arange(0, BLOCK_D)
    query_rows = query + sequence.to(tl.int64) * query_token_stride + heads * query_head_stride
    q_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    positions = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)

    middle = begin
    if HAS_WINDOW:
        middle = tl.maximum(begin, tl.cdiv(first_key, BLOCK_N) * BLOCK_N)
        middle = tl.minimum(middle, tl.cdiv(key_end, BLOCK_N) * BLOCK_N)
    tail = tl.maximum(middle, key_end // BLOCK_N * BLOCK_N)

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and not IS_PARTIAL:
        sink_scores = tl.load(sinks + heads, mask=row_mask, other=0.0).to(tl.float32)
        row_max = sink_scores * 1.4426950408889634
        row_sum += 1.0
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    if HAS_WINDOW:
        accumulator, row_max, row_sum = _attend_keys(
            accumulator, row_max, row_sum, q, positions, begin, middle, first_key, key_end, window,
            table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
            HAS_SOFTCAP, True, True,
        )  # fmt: skip
    accumulator, row_max, row_sum = _attend_keys(
        accumulator, row_max, row_sum, q, positions, middle, tail, first_key, key_end, window,
        table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
        HAS_SOFTCAP, False, False,
    )  # fmt: skip
    accumulator, row_max, row_sum = _attend_keys(
        accumulator, row_max, row_sum, q, positions, tail, key_end, first_key, key_end, window,
        table, k_head, v_head, k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
        score_scale, cap_log2, HEAD_DIM, VALUE_HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_DV,
        HAS_SOFTCAP, True, False,
    )  # fmt: skip

    attended = accumulator / row_sum[:, None] * value_scale
    tl.store(output_ptrs, attended.to(output.dtype.element_ty), mask=o_mask)
    if IS_PARTIAL:
        tl.store(lse + partial_rows, row_max + tl.log2(row_sum), mask=row_mask)


@triton.jit(do_not_specialize=["num_splits"])
def paged_decode_reduce_kernel(
    output,
    partials,
    lse,
    sinks,
    num_splits,
    output_token_stride,
    output_head_stride,
    VALUE_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (sequences, heads): merges the splits one after another, so that empty ones add 0."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    value_dims = tl.arange(0, BLOCK_DV)
    first_split = (sequence * tl.num_programs(1) + head) * num_splits

    shift = -float("inf")
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        shift = sink
    for split in range(num_splits):
        shift = tl.maximum(shift, tl.load(lse + first_split + split))
    shift = tl.where(shift == -float("inf"), 0.0, shift)

    total = 0.0
    if HAS_SINKS:
        total = tl.exp2(sink - shift)
    accumulator = tl.zeros([BLOCK_DV], tl.float32)
    for split in range(num_splits):
        weight = tl.exp2(tl.load(lse + first_split + split) - shift)
        # An empty split has written nothing but its lse: what lies there must not be multiplied.
        num_written = tl.where(weight > 0.0, VALUE_HEAD_DIM, 0)
        partial_ptrs = partials + (first_split + split) * VALUE_HEAD_DIM + value_dims
        partial = tl.load(partial_ptrs, mask=value_dims < num_written, other=0.0)
        accumulator += weight * partial
        total += weight
    # A padded row has no keys at all; its output is zero.
    attended = tl.where(total > 0.0, accumulator / total, 0.0)
    output_ptrs = output + sequence * output_token_stride + head * output_head_stride + value_dims
    tl.store(output_ptrs, attended.to(output.dtype.element_ty), mask=value_dims < VALUE_HEAD_DIM)
