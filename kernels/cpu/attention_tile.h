// Attention of a few query rows over a run of keys, with an online softmax in float32.
//
// A row's result has the same bits whatever rows share its tile: keys are taken in groups that
// start at multiples of kGroupKeys, masked keys add exact zeros, and every KV split of
// kSplitKeys positions is summed apart and folded in ascending order.
#pragma once

#include <cmath>
#include <limits>

#include "attention.h"
#include "vector.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kGroupKeys = 32;
constexpr int64_t kSplitKeys = 512;
constexpr int kKeysAtOnce = 4;
constexpr int kRowsAtOnce = kWidth == 16 ? 4 : 2;
constexpr int kValueRows = 4;
constexpr int kValueVectors = kWidth == 16 ? 4 : 2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Consecutive rows of one sequence and KV head. Row r is query r / group, head r % group.
struct Tile {
    int64_t sequence, kv_head, first_row;
    int num_rows;
    int64_t first_key, last_key;  // visible to at least one row, both included
};

struct Mask {
    int64_t first[kTileRows], last[kTileRows];  // the keys that each row sees
};

// Running maximum, sum of weights and weighted values of each row.
struct Partial {
    float* maximum;
    float* sum;
    float* values;  // [kTileRows, value_dim]
};

CBATCH_INLINE void clear(const Partial& partial, int num_rows, int64_t value_dim) {
    for (int row = 0; row < num_rows; ++row) {
        partial.maximum[row] = -kInfinity;
        partial.sum[row] = 0.0f;
    }
    for (int64_t i = 0; i < num_rows * value_dim; ++i) partial.values[i] = 0.0f;
}

CBATCH_INLINE void scale_row(float* values, float factor, int64_t size) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) store(values + i, load(values + i) * factor);
    for (; i < size; ++i) values[i] *= factor;
}

// Adds `part` to `total`.
CBATCH_ONE_COPY void fold(const Partial& total, const Partial& part, int num_rows,
                          int64_t value_dim) {
    for (int row = 0; row < num_rows; ++row) {
        if (part.maximum[row] == -kInfinity) continue;  // the row sees nothing of this part
        const bool is_larger = part.maximum[row] > total.maximum[row];
        const float maximum = is_larger ? part.maximum[row] : total.maximum[row];
        const float old_weight = exponential(total.maximum[row] - maximum);
        const float new_weight = exponential(part.maximum[row] - maximum);
        total.maximum[row] = maximum;
        total.sum[row] = total.sum[row] * old_weight + part.sum[row] * new_weight;
        float* to = total.values + row * value_dim;
        const float* from = part.values + row * value_dim;
        int64_t i = 0;
        for (; i + kWidth <= value_dim; i += kWidth) {
            store(to + i, load(to + i) * old_weight + load(from + i) * new_weight);
        }
        for (; i < value_dim; ++i) to[i] = to[i] * old_weight + from[i] * new_weight;
    }
}

// Asks for what is needed a group of keys later. It goes to the second cache: by then the first one
// would have lost it, and has room for fewer lines on their way than memory takes to be kept busy.
CBATCH_INLINE void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// scores[row][key] of ROWS queries and kKeysAtOnce keys; fetches `next`, the rows needed after them,
// unless there are none.
template <int ROWS, bool FETCHES, class Element>
CBATCH_INLINE void score(const float* query, int64_t dim, const Element* const* keys,
                         const Element* const* next, float* scores) {
    Vec sums[ROWS][kKeysAtOnce] = {};
    int64_t i = 0;
    for (; i + kWidth <= dim; i += kWidth) {
        Vec key[kKeysAtOnce];
        CBATCH_UNROLL
        for (int k = 0; k < kKeysAtOnce; ++k) {
            key[k] = load(keys[k] + i);
            if constexpr (FETCHES) fetch(next[k] + i);
        }
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            const Vec q = load(query + row * dim + i);
            CBATCH_UNROLL
            for (int k = 0; k < kKeysAtOnce; ++k) sums[row][k] += q * key[k];
        }
    }
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        sum_lanes(sums[row][0], sums[row][1], sums[row][2], sums[row][3],
                  scores + row * kGroupKeys);
    }
    for (; i < dim; ++i) {
        for (int row = 0; row < ROWS; ++row) {
            for (int k = 0; k < kKeysAtOnce; ++k) {
                float& sum = scores[row * kGroupKeys + k];
                sum = multiply_add(query[row * dim + i], to_float(keys[k][i]), sum);
            }
        }
    }
}

// values[row] += weights[row] x the values of `num_keys` positions, ROWS x VECTORS registers.
template <int ROWS, int VECTORS, bool FETCHES, class Element>
CBATCH_INLINE void add_values(const float* weights, const Element* const* rows,
                              const Element* const* next, int first, int end, float* values,
                              int64_t value_dim, int64_t offset) {
    Vec sums[ROWS][VECTORS];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            sums[row][v] = load(values + row * value_dim + offset + v * kWidth);
        }
    }
    for (int k = first; k < end; ++k) {
        Vec value[VECTORS];
        CBATCH_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            value[v] = load(rows[k] + offset + v * kWidth);
            if constexpr (FETCHES) fetch(next[k] + offset + v * kWidth);
        }
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            const Vec weight = splat(weights[row * kGroupKeys + k]);
            CBATCH_UNROLL
            for (int v = 0; v < VECTORS; ++v) sums[row][v] += weight * value[v];
        }
    }
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            store(values + row * value_dim + offset + v * kWidth, sums[row][v]);
        }
    }
}

template <int ROWS, bool FETCHES, class Element>
inline void add_value_rows(const float* weights, const Element* const* rows,
                           const Element* const* next, int first, int end, float* values,
                           int64_t value_dim) {
    int64_t offset = 0;
    for (; offset + kValueVectors * kWidth <= value_dim; offset += kValueVectors * kWidth) {
        add_values<ROWS, kValueVectors, FETCHES>(weights, rows, next, first, end, values, value_dim,
                                                 offset);
    }
    for (; offset + kWidth <= value_dim; offset += kWidth) {
        add_values<ROWS, 1, FETCHES>(weights, rows, next, first, end, values, value_dim, offset);
    }
    for (; offset < value_dim; ++offset) {
        for (int row = 0; row < ROWS; ++row) {
            float sum = values[row * value_dim + offset];
            for (int k = first; k < end; ++k) {
                sum = multiply_add(weights[row * kGroupKeys + k], to_float(rows[k][offset]), sum);
            }
            values[row * value_dim + offset] = sum;
        }
    }
}

// Scores of one group of keys turned into weights; rescales what the row has summed so far.
CBATCH_ONE_COPY void weigh(float* scores, int64_t group_start, int64_t first, int64_t last,
                           float softcap, const Partial& partial, int row, int64_t value_dim) {
    constexpr int kVectors = kGroupKeys / kWidth;
    if (softcap > 0.0f) {
        for (int v = 0; v < kVectors; ++v) {
            const Vec score = load(scores + v * kWidth);
            store(scores + v * kWidth, hyperbolic_tangent(score / softcap) * softcap);
        }
    }
    if (first > group_start || last < group_start + kGroupKeys - 1) {
        for (int k = 0; k < kGroupKeys; ++k) {
            const int64_t position = group_start + k;
            if (position < first || position > last) scores[k] = -kInfinity;
        }
    }
    Vec largest = load(scores);
    for (int v = 1; v < kVectors; ++v) largest = maximum(largest, load(scores + v * kWidth));
    const float old_maximum = partial.maximum[row];
    const float group_maximum = max_lanes(largest);
    const float new_maximum = group_maximum > old_maximum ? group_maximum : old_maximum;
    // A row that has seen nothing yet keeps weights of zero.
    const float base = new_maximum == -kInfinity ? 0.0f : new_maximum;
    Vec sum = {};
    for (int v = 0; v < kVectors; ++v) {
        const Vec weight = exponential(load(scores + v * kWidth) - base);
        store(scores + v * kWidth, weight);
        sum += weight;
    }
    if (new_maximum != old_maximum) {
        const float factor = exponential(old_maximum - base);
        partial.sum[row] *= factor;
        scale_row(partial.values + row * value_dim, factor, value_dim);
        partial.maximum[row] = new_maximum;
    }
    partial.sum[row] += sum_lanes(sum);
}

// Where the positions of one group lie; those outside the tile point to a position inside.
template <class Element>
struct GroupRows {
    const Element* keys[kGroupKeys];
    const Element* values[kGroupKeys];

    void find(const CbatchAttention& args, const Tile& tile, int64_t start, int64_t first,
              int64_t last) {
        const int32_t* table = args.block_tables + tile.sequence * args.block_table_stride;
        int64_t block = first / args.block_size, slot = first % args.block_size;
        const auto point = [&](int64_t k) __attribute__((always_inline)) {
            keys[k] = static_cast<const Element*>(args.k_cache) +
                      table[block] * args.k_block_stride + slot * args.k_slot_stride +
                      tile.kv_head * args.k_head_stride;
            values[k] = static_cast<const Element*>(args.v_cache) +
                        table[block] * args.v_block_stride + slot * args.v_slot_stride +
                        tile.kv_head * args.v_head_stride;
        };
        for (int64_t position = first; position <= last; ++position) {
            point(position - start);
            if (++slot == args.block_size) {
                slot = 0;
                ++block;
            }
        }
        for (int64_t k = 0; k < first - start; ++k) {
            keys[k] = keys[first - start];
            values[k] = values[first - start];
        }
        for (int64_t k = last - start + 1; k < kGroupKeys; ++k) {
            keys[k] = keys[last - start];
            values[k] = values[last - start];
        }
    }
};

// Scores of all rows; the first of them to read a key fetches its value.
template <class Element>
inline void score_group(const float* query, int num_rows, int64_t dim,
                        const GroupRows<Element>& group, int first, int end, float* scores) {
    for (int k = first / kKeysAtOnce * kKeysAtOnce; k < end; k += kKeysAtOnce) {
        const Element* const* keys = group.keys + k;
        const Element* const* values = group.values + k;
        int row = 0;
        for (; row + kRowsAtOnce <= num_rows; row += kRowsAtOnce) {
            const float* from = query + row * dim;
            float* to = scores + row * kGroupKeys + k;
            if (row == 0) {
                score<kRowsAtOnce, true>(from, dim, keys, values, to);
            } else {
                score<kRowsAtOnce, false>(from, dim, keys, values, to);
            }
        }
        for (; row < num_rows; ++row) {
            score<1, true>(query + row * dim, dim, keys, values, scores + row * kGroupKeys + k);
        }
    }
}

// The weighted values of all rows; the first of them to read a value fetches the next group's key.
template <class Element>
inline void add_group(const float* scores, int num_rows, const GroupRows<Element>& group,
                      const GroupRows<Element>& next, int first, int end, float* values,
                      int64_t value_dim) {
    int row = 0;
    for (; row + kValueRows <= num_rows; row += kValueRows) {
        const float* weights = scores + row * kGroupKeys;
        float* to = values + row * value_dim;
        if (row == 0) {
            add_value_rows<kValueRows, true>(weights, group.values, next.keys, first, end, to,
                                             value_dim);
        } else {
            add_value_rows<kValueRows, false>(weights, group.values, next.keys, first, end, to,
                                              value_dim);
        }
    }
    for (; row < num_rows; ++row) {
        add_value_rows<1, true>(scores + row * kGroupKeys, group.values, next.keys, first, end,
                                values + row * value_dim, value_dim);
    }
}

// Sums the keys `first_key` to `last_key`, all within one split, into `partial`.
template <class Element>
CBATCH_ONE_COPY void attend_split(const CbatchAttention& args, const Tile& tile,
                                  const Mask& mask, const float* query, int64_t first_key,
                                  int64_t last_key, const Partial& partial) {
    alignas(64) float scores[kTileRows * kGroupKeys];
    GroupRows<Element> groups[2];  // the one at hand and the one after it, in turn
    clear(partial, tile.num_rows, args.value_head_dim);
    const auto find = [&](int64_t start) {
        const int64_t first = start > first_key ? start : first_key;
        const int64_t end = start + kGroupKeys - 1;
        groups[start / kGroupKeys % 2].find(args, tile, start, first,
                                            end < last_key ? end : last_key);
    };
    const int64_t first_group = first_key / kGroupKeys * kGroupKeys;
    find(first_group);
    for (int64_t start = first_group; start <= last_key; start += kGroupKeys) {
        const bool is_last = start + kGroupKeys > last_key;
        if (!is_last) find(start + kGroupKeys);
        const GroupRows<Element>& group = groups[start / kGroupKeys % 2];
        const GroupRows<Element>& next = groups[(start / kGroupKeys + (is_last ? 0 : 1)) % 2];
        const int begin = start > first_key ? 0 : static_cast<int>(first_key - start);
        const int64_t keys_left = last_key - start + 1;
        const int end = static_cast<int>(keys_left < kGroupKeys ? keys_left : kGroupKeys);
        score_group(query, tile.num_rows, args.head_dim, group, begin, end, scores);
        for (int row = 0; row < tile.num_rows; ++row) {
            weigh(scores + row * kGroupKeys, start, mask.first[row], mask.last[row], args.softcap,
                  partial, row, args.value_head_dim);
        }
        add_group(scores, tile.num_rows, group, next, begin, end, partial.values,
                  args.value_head_dim);
    }
}

}  // namespace
