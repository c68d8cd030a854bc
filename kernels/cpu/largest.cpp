// Of a product with a vocabulary the columns that can be their row's largest, exactly.
//
// `logits` comes with approximations whose error has a proven bound. A column whose upper bound is
// below another one's lower bound cannot be the largest and becomes -inf; every other one is
// computed again as the float32 product computes it (see gemm.cpp), to the same bits.

#include <limits>

#include "gemm.h"
#include "scratch.h"

namespace {

constexpr int64_t kBlock = 64;           // columns that share one upper bound
constexpr int64_t kBlocksPerItem = 64;   // blocks that one thread takes at a time
constexpr int kChains = 8;               // columns computed at once, to hide the latency of sums
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Weights {
    const float* values;  // [num_columns, depth]
    int64_t depth;
};

struct Bounds {
    const float* errors;  // of the column's approximation, per unit of the row's norm
    const float* norms;
    float row_norm, row_error;

    // How far the approximation of a column may lie from its exact value.
    CBATCH_INLINE Vec distance(int64_t column) const {
        return load(errors + column) * row_norm + load(norms + column) * row_error;
    }
    CBATCH_INLINE float distance_of(int64_t column) const {
        return multiply_add(norms[column], row_error, errors[column] * row_norm);
    }
};

struct Range {
    float lowest;   // the largest lower bound
    float highest;  // the largest upper bound; +inf if some bound is not a number
};

Range bound_block(const float* logits, const Bounds& bounds, int64_t first, int64_t end) {
    Vec lower = splat(-kInfinity), upper = splat(-kInfinity);
    IntVec is_nan = {};
    int64_t i = first;
    for (; i + kWidth <= end; i += kWidth) {
        const Vec value = load(logits + i), distance = bounds.distance(i);
        lower = maximum(value - distance, lower);
        upper = maximum(value + distance, upper);
        is_nan |= (value + distance) != (value + distance);
    }
    Range range{max_lanes(lower), max_lanes(upper)};
    bool any_nan = false;
    for (int lane = 0; lane < kWidth; ++lane) any_nan |= is_nan[lane] != 0;
    for (; i < end; ++i) {
        const float distance = bounds.distance_of(i);
        range.lowest = logits[i] - distance > range.lowest ? logits[i] - distance : range.lowest;
        range.highest = logits[i] + distance > range.highest ? logits[i] + distance : range.highest;
        any_nan |= logits[i] + distance != logits[i] + distance;
    }
    if (any_nan) range.highest = kInfinity;
    return range;
}

void compute_exactly(const Weights& weights, const float* row, const int64_t* columns, int count,
                     float* logits) {
    const float* from[kChains];
    for (int c = 0; c < kChains; ++c) {
        from[c] = weights.values + columns[c < count ? c : 0] * weights.depth;
    }
    float sums[kChains] = {};
    for (int64_t k = 0; k < weights.depth; ++k) {
        CBATCH_UNROLL
        for (int c = 0; c < kChains; ++c) sums[c] = multiply_add(row[k], from[c][k], sums[c]);
    }
    for (int c = 0; c < count; ++c) logits[columns[c]] = sums[c];
}

// Returns how many columns of the block are computed.
int64_t keep_in_block(const Weights& weights, const Bounds& bounds, const float* row, float lowest,
                      int64_t first, int64_t end, float* logits) {
    int64_t kept[kBlock];
    int64_t count = 0;
    for (int64_t i = first; i < end; ++i) {
        // What is not a number is not below anything.
        if (logits[i] + bounds.distance_of(i) < lowest) {
            logits[i] = -kInfinity;
        } else {
            kept[count++] = i;
        }
    }
    for (int64_t done = 0; done < count; done += kChains) {
        const int64_t left = count - done;
        compute_exactly(weights, row, kept + done,
                        static_cast<int>(left < kChains ? left : kChains), logits);
    }
    return count;
}

}  // namespace

// `kept` gets the number of columns of each row that were computed; the others are -inf.
CBATCH_EXPORT(keep_largest)(const float* input, int64_t input_stride, int64_t num_rows,
                            int64_t depth, const float* weight, const float* column_errors,
                            const float* column_norms, const float* row_norms,
                            const float* row_errors, int64_t num_columns, float* logits,
                            int64_t logits_stride, int64_t* kept, int64_t num_threads) {
    const Weights weights{weight, depth};
    const int64_t num_blocks = ceil_div(num_columns, kBlock);
    const int64_t items_per_row = ceil_div(num_blocks, kBlocksPerItem);
    const int64_t num_items = num_rows * items_per_row;
    const Scratch upper_memory(static_cast<size_t>(num_rows * num_blocks) * sizeof(float));
    const Scratch lower_memory(static_cast<size_t>(num_items) * sizeof(float));
    const Scratch count_memory(static_cast<size_t>(num_items) * sizeof(int64_t));
    float* upper = upper_memory.as<float>();
    float* lower = lower_memory.as<float>();
    int64_t* counts = count_memory.as<int64_t>();
    const auto end_block = [&](int64_t item) {
        const int64_t end = (item % items_per_row + 1) * kBlocksPerItem;
        return end < num_blocks ? end : num_blocks;
    };
    const auto end_column = [&](int64_t block) {
        return (block + 1) * kBlock < num_columns ? (block + 1) * kBlock : num_columns;
    };
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_items; ++item) {
            const int64_t row = item / items_per_row;
            const Bounds bounds{column_errors, column_norms, row_norms[row], row_errors[row]};
            float lowest = -kInfinity;
            for (int64_t b = item % items_per_row * kBlocksPerItem; b < end_block(item); ++b) {
                const Range range = bound_block(logits + row * logits_stride, bounds, b * kBlock,
                                                end_column(b));
                lowest = range.lowest > lowest ? range.lowest : lowest;
                upper[row * num_blocks + b] = range.highest;
            }
            lower[item] = lowest;
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_items; ++item) {
            const int64_t row = item / items_per_row;
            const Bounds bounds{column_errors, column_norms, row_norms[row], row_errors[row]};
            float lowest = -kInfinity;
            for (int64_t i = row * items_per_row; i < (row + 1) * items_per_row; ++i) {
                lowest = lower[i] > lowest ? lower[i] : lowest;
            }
            float* row_logits = logits + row * logits_stride;
            counts[item] = 0;
            for (int64_t b = item % items_per_row * kBlocksPerItem; b < end_block(item); ++b) {
                if (upper[row * num_blocks + b] < lowest) {
                    for (int64_t i = b * kBlock; i < end_column(b); ++i) row_logits[i] = -kInfinity;
                    continue;
                }
                counts[item] += keep_in_block(weights, bounds, input + row * input_stride, lowest,
                                              b * kBlock, end_column(b), row_logits);
            }
        }
    }
    for (int64_t row = 0; row < num_rows; ++row) {
        kept[row] = 0;
        for (int64_t i = 0; i < items_per_row; ++i) kept[row] += counts[row * items_per_row + i];
    }
}
