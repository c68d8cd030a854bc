// output[m, n] = input[m, k] x weight[n, k]^T + bias[n] in float32, with weights in panels.
//
// Every output is one chain of fused multiply-adds over the whole depth, so its bits do not depend
// on the number of rows, nor on the tiles, nor on the number of threads.

#include "gemm.h"

#include "scratch.h"

namespace {

constexpr int kLinesPerStep = kPanel * 4 > 64 ? kPanel * 4 / 64 : 1;
// How far ahead weights are fetched that are read once, in steps of depth: by panels one after
// another, and by several at once.
constexpr int kPrefetchSteps = 64, kPrefetchStepsOfEach = 32;
// Up to so many tiles memory is what is waited for, and the second cache can have more lines on their
// way than the first; with more tiles computing is, for which weights lie better in the first.
constexpr int64_t kTilesToWaitForMemory = 2;

struct Product {
    const float* panels;
    const float* bias;  // or null
    float* output;
    int64_t depth, num_columns, output_stride;
};

// Step k of `input` holds ROWS values. Computes ROWS x (PANELS x kPanel) outputs.
template <int ROWS, int PANELS, int LOCALITY>
CBATCH_INLINE void multiply(const Product& product, const float* input, int64_t first_row,
                            int64_t first_panel, NextWeights next) {
    constexpr int kVectors = 2 * PANELS, kColumns = PANELS * kPanel;
    const int64_t depth = product.depth, column = first_panel * kPanel;
    const float* panels = product.panels + first_panel * kPanel * depth;
    const float* bias = product.bias == nullptr ? nullptr : product.bias + column;
    float* output = product.output + first_row * product.output_stride + column;
    Vec sums[ROWS][kVectors];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[row][v] = Vec{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec weight[kVectors];
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const float* step = panels + (v / 2 * depth + k) * kPanel + v % 2 * kWidth;
            weight[v] = load(step);
            if constexpr (PANELS > 1) {
                __builtin_prefetch(step + kPrefetchStepsOfEach * kPanel, 0, LOCALITY);
            }
        }
        if constexpr (PANELS == 1) next.fetch<kLinesPerStep, LOCALITY>(k);
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            const Vec value = splat(input[k * ROWS + row]);
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[row][v] += value * weight[v];
        }
    }
    if (column + kColumns <= product.num_columns) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const Vec offset = bias == nullptr ? Vec{} : load(bias + v * kWidth);
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                store(output + row * product.output_stride + v * kWidth, sums[row][v] + offset);
            }
        }
        return;
    }
    float tile[ROWS][kColumns];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) store(&tile[row][v * kWidth], sums[row][v]);
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int64_t i = 0; column + i < product.num_columns; ++i) {
            output[row * product.output_stride + i] =
                tile[row][i] + (bias == nullptr ? 0.0f : bias[i]);
        }
    }
}

template <int ROWS, int LOCALITY>
void multiply_tile(int num_rows, const Product& product, const float* input, int64_t first_row,
                   int64_t panel, NextWeights next) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1, LOCALITY>(product, input, first_row, panel, next);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1, LOCALITY>(num_rows, product, input, first_row, panel, next);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`.
void multiply_panel(const Product& product, const float* rows, const RowTiles& tiles,
                    int64_t first_tile, int64_t end_tile, int64_t panel, int64_t panels_ahead) {
    const int64_t depth = product.depth, num_tiles = end_tile - first_tile;
    // A single tile reads its panel once: what it needs next is a little further on.
    const int64_t steps_ahead = num_tiles == 1 ? kPrefetchSteps : panels_ahead * depth;
    const float* ahead = product.panels + (panel * depth + steps_ahead) * kPanel;
    const auto multiply = num_tiles <= kTilesToWaitForMemory ? multiply_tile<kMaxRows, 2>
                                                             : multiply_tile<kMaxRows, 3>;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        const int64_t first = tiles.start(tile);
        multiply(tiles.size(tile), product, rows + first * depth, first, panel,
                 NextWeights(ahead, kPanel * sizeof(float), depth, tile - first_tile, num_tiles));
    }
}

// Step k of `to` holds the `size` values of the rows.
void pack_rows(const float* from, int64_t stride, int size, int64_t depth, float* to) {
    // A few lines of every row at a time, so that what is written to stays near.
    constexpr int64_t kStepsAtOnce = 64;
    for (int64_t start = 0; start < depth; start += kStepsAtOnce) {
        const int64_t end = start + kStepsAtOnce < depth ? start + kStepsAtOnce : depth;
        for (int row = 0; row < size; ++row) {
            for (int64_t k = start; k < end; ++k) to[k * size + row] = from[row * stride + k];
        }
    }
}

void multiply_few(int num_rows, const Product& product, const float* input, int64_t panel) {
    const NextWeights none(nullptr, 0, 1, 0, 1);
    if (num_rows == 1) {
        multiply<1, 4, 2>(product, input, 0, panel, none);
    } else {
        multiply<2, 2, 2>(product, input, 0, panel, none);
        multiply<2, 2, 2>(product, input, 0, panel + 2, none);
    }
}

}  // namespace

// `packed` holds ceil(num_columns / kPanel) * kPanel * depth floats.
CBATCH_EXPORT(pack_linear)(const float* weight, int64_t num_columns, int64_t depth, float* packed,
                           int64_t num_threads) {
    const int64_t num_panels = ceil_div(num_columns, kPanel);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        float* to = packed + panel * kPanel * depth;
        for (int column = 0; column < kPanel; ++column) {
            const int64_t index = panel * kPanel + column;
            for (int64_t k = 0; k < depth; ++k) {
                to[k * kPanel + column] = index < num_columns ? weight[index * depth + k] : 0.0f;
            }
        }
    }
}

CBATCH_EXPORT(linear)(const float* input, int64_t input_stride, int64_t num_rows, int64_t depth,
                      const float* packed, const float* bias, int64_t num_columns, float* output,
                      int64_t output_stride, int64_t num_threads) {
    const Product product{packed, bias, output, depth, num_columns, output_stride};
    const RowTiles tiles(num_rows);
    const int64_t num_panels = ceil_div(num_columns, kPanel);
    const WorkSplit work(num_panels, num_rows <= 2, tiles.count, num_threads);
    const Scratch memory(static_cast<size_t>(num_rows * depth) * sizeof(float));
    float* rows = memory.as<float>();
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int64_t first = tiles.start(tile);
            const int size = tiles.size(tile);
            pack_rows(input + first * input_stride, input_stride, size, depth, rows + first * depth);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < work.count(); ++item) {
            int64_t panel = work.first_panel(item);
            if (work.is_several(item)) {
                multiply_few(static_cast<int>(num_rows), product, rows, panel);
                continue;
            }
            for (; panel < work.end_panel(item); ++panel) {
                multiply_panel(product, rows, tiles, work.first_tile(item), work.end_tile(item),
                               panel, num_threads);
            }
        }
    }
}
