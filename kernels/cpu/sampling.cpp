// Statistics of rows of logits: maxima, sums of exponentials and the largest values.

#include <algorithm>
#include <cmath>
#include <limits>

#include "scratch.h"
#include "vector.h"

namespace {

// Consecutive logits that share one maximum; kernels/cpu_sampling.py has the same number.
constexpr int64_t kBlock = 256;
// Blocks that one thread takes at a time.
constexpr int64_t kBlocksPerItem = 64;

// The largest of `size` values, or not a number if one of them is not.
float block_maximum(const float* from, int64_t size) {
    float result = -std::numeric_limits<float>::infinity();
    bool is_nan = false;
    int64_t i = 0;
    if (size >= 4 * kWidth) {
        Vec largest[4], rest = {};
        CBATCH_UNROLL
        for (int v = 0; v < 4; ++v) largest[v] = splat(result);
        for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
            CBATCH_UNROLL
            for (int v = 0; v < 4; ++v) {
                const Vec value = load(from + i + v * kWidth);
                largest[v] = value > largest[v] ? value : largest[v];
                rest = value != value ? value : rest;
            }
        }
        result = max_lanes(maximum(maximum(largest[0], largest[1]),
                                   maximum(largest[2], largest[3])));
        for (int lane = 0; lane < kWidth; ++lane) is_nan |= rest[lane] != rest[lane];
    }
    for (; i < size; ++i) {
        is_nan |= from[i] != from[i];
        result = from[i] > result ? from[i] : result;
    }
    return is_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

struct Block {
    float maximum;
};

struct Candidate {
    float value;
    int64_t id;
};

// The largest value first; of equal ones the lower id.
bool comes_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// `blocks` and `found` are scratch: num_blocks and count * (kBlock + 1) + kBlock entries.
void top_of_row(const float* row, int64_t vocab_size, const float* maxima, int64_t count,
                Block* blocks, Candidate* found, float* values, int64_t* ids) {
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    float threshold = -std::numeric_limits<float>::infinity();
    if (num_blocks > count) {
        for (int64_t b = 0; b < num_blocks; ++b) blocks[b].maximum = maxima[b];
        std::nth_element(blocks, blocks + count - 1, blocks + num_blocks,
                         [](const Block& a, const Block& b) { return a.maximum > b.maximum; });
        threshold = blocks[count - 1].maximum;
    }
    // At least `count` values reach the threshold, and fewer than `count` blocks exceed it.
    int64_t num_found = 0, num_equal = 0;
    for (int64_t b = 0; b < num_blocks; ++b) {
        if (maxima[b] < threshold) continue;
        const int64_t end = std::min((b + 1) * kBlock, vocab_size);
        for (int64_t id = b * kBlock; id < end; ++id) {
            if (row[id] < threshold) continue;
            if (row[id] == threshold && num_equal++ >= count) continue;
            found[num_found++] = Candidate{row[id], id};
        }
    }
    std::partial_sort(found, found + count, found + num_found, comes_before);
    for (int64_t i = 0; i < count; ++i) {
        values[i] = found[i].value;
        ids[i] = found[i].id;
    }
}

}  // namespace

// best, best_ids [num_rows] and block_maxima [num_rows, ceil(vocab_size / kBlock)]. Of equal
// logits the first is best. A row with a logit that is not a number has such a best, and id 0.
CBATCH_EXPORT(row_maxima)(const float* logits, int64_t stride, int64_t num_rows,
                          int64_t vocab_size, float* block_maxima, float* best, int64_t* best_ids,
                          int64_t num_threads) {
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    const int64_t items_per_row = (num_blocks + kBlocksPerItem - 1) / kBlocksPerItem;
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_rows * items_per_row; ++item) {
            const int64_t row = item / items_per_row;
            const int64_t first = item % items_per_row * kBlocksPerItem;
            const int64_t end = std::min(first + kBlocksPerItem, num_blocks);
            for (int64_t b = first; b < end; ++b) {
                block_maxima[row * num_blocks + b] =
                    block_maximum(logits + row * stride + b * kBlock,
                                  std::min(kBlock, vocab_size - b * kBlock));
            }
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) {
            const float* maxima = block_maxima + row * num_blocks;
            int64_t block = 0;
            bool is_nan = maxima[0] != maxima[0];
            for (int64_t b = 1; b < num_blocks; ++b) {
                if (maxima[b] > maxima[block]) block = b;
                is_nan |= maxima[b] != maxima[b];
            }
            best[row] = is_nan ? std::numeric_limits<float>::quiet_NaN() : maxima[block];
            best_ids[row] = 0;
            if (is_nan) continue;
            int64_t id = block * kBlock;
            while (logits[row * stride + id] != maxima[block]) ++id;
            best_ids[row] = id;
        }
    }
}

// sums[row] = sum of exp((logit - best[row]) * factors[row]), in float64 over blocks.
CBATCH_EXPORT(exponential_sums)(const float* logits, int64_t stride, int64_t num_rows,
                                int64_t vocab_size, const float* best, const float* factors,
                                double* sums, int64_t num_threads) {
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
    const Scratch memory(static_cast<size_t>(num_rows * num_blocks) * sizeof(float));
    float* block_sums = memory.as<float>();
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_rows * num_blocks; ++item) {
            const int64_t row = item / num_blocks, first = item % num_blocks * kBlock;
            const int64_t size = std::min(kBlock, vocab_size - first);
            const float* from = logits + row * stride + first;
            Vec sum = {};
            int64_t i = 0;
            for (; i + kWidth <= size; i += kWidth) {
                sum += exponential((load(from + i) - best[row]) * factors[row]);
            }
            float total = sum_lanes(sum);
            for (; i < size; ++i) total += exponential((from[i] - best[row]) * factors[row]);
            block_sums[item] = total;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) {
            double total = 0.0;
            for (int64_t b = 0; b < num_blocks; ++b) total += block_sums[row * num_blocks + b];
            sums[row] = total;
        }
    }
}

// The `count` largest logits of each row, in falling order, exactly; of equal ones the lower id.
// `count` <= vocab_size. Rows whose maxima hold a value that is not a number are left alone.
CBATCH_EXPORT(top_logits)(const float* logits, int64_t stride, int64_t num_rows,
                          int64_t vocab_size, const float* block_maxima, const float* best,
                          int64_t count, float* values, int64_t* ids, int64_t num_threads) {
    const int64_t num_blocks = (vocab_size + kBlock - 1) / kBlock;
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        const Scratch block_memory(static_cast<size_t>(num_blocks) * sizeof(Block));
        const Scratch found_memory(static_cast<size_t>(count * (kBlock + 1) + kBlock) *
                                   sizeof(Candidate));
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < num_rows; ++row) {
            if (best[row] != best[row]) continue;
            top_of_row(logits + row * stride, vocab_size, block_maxima + row * num_blocks, count,
                       block_memory.as<Block>(), found_memory.as<Candidate>(),
                       values + row * count, ids + row * count);
        }
    }
}
