// output[m, n] = input[m, k] x weight[n, k]^T + bias[n] in float32, with weights in panels.
//
// Every output is one chain of fused multiply-adds over the whole depth, so its bits do not depend
// on the number of rows, nor on the tiles, nor on the number of threads.

#include "gemm.h"

#include "scratch.h"

namespace {

constexpr int kFloatsPerLine = 16;
// How far ahead weights are fetched, in steps of depth; panels follow one another in memory.
constexpr int kPrefetchSteps = 16;

struct Product {
    const float* panels;
    const float* bias;  // or null
    float* output;
    int64_t depth, num_columns, output_stride;
};

// Step k of `input` holds ROWS values. Computes ROWS x (PANELS x kPanel) outputs.
template <int ROWS, int PANELS>
CBATCH_INLINE void multiply(const Product& product, const float* input, int64_t first_row,
                            int64_t first_panel) {
    constexpr int kVectors = 2 * PANELS;
    const int64_t depth = product.depth;
    const float* panels = product.panels + first_panel * kPanel * depth;
    Vec sums[ROWS][kVectors];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[row][v] = Vec{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        Vec weight[kVectors];
        CBATCH_UNROLL
        for (int panel = 0; panel < PANELS; ++panel) {
            const float* step = panels + (panel * depth + k) * kPanel;
            weight[2 * panel] = load(step);
            weight[2 * panel + 1] = load(step + kWidth);
            CBATCH_UNROLL
            for (int line = 0; line < kPanel; line += kFloatsPerLine) {
                __builtin_prefetch(step + kPrefetchSteps * kPanel + line);
            }
        }
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            const Vec value = splat(input[k * ROWS + row]);
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[row][v] += value * weight[v];
        }
    }
    const int64_t column = first_panel * kPanel;
    float* output = product.output + first_row * product.output_stride + column;
    const float* bias = product.bias == nullptr ? nullptr : product.bias + column;
    if (column + PANELS * kPanel <= product.num_columns) {
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
    float tile[ROWS][PANELS * kPanel];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) store(&tile[row][v * kWidth], sums[row][v]);
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int64_t i = 0; column + i < product.num_columns; ++i) {
            const float offset = bias == nullptr ? 0.0f : bias[i];
            output[row * product.output_stride + i] = tile[row][i] + offset;
        }
    }
}

template <int ROWS>
void multiply_tile(int num_rows, const Product& product, const float* input, int64_t first_row,
                   int64_t panel) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1>(product, input, first_row, panel);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1>(num_rows, product, input, first_row, panel);
    }
}

// Few rows: several panels at once hide the latency of the additions.
constexpr int kPanelsAtOnce = 4;

void multiply_few(int num_rows, const Product& product, const float* input, int64_t panel) {
    if (num_rows == 1) {
        multiply<1, 4>(product, input, 0, panel);
    } else {
        multiply<2, 2>(product, input, 0, panel);
        multiply<2, 2>(product, input, 0, panel + 2);
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
    const bool few_rows = num_rows <= 2;
    const WorkSplit work(num_panels, few_rows ? kPanelsAtOnce : 1, tiles.count, num_threads);
    const Scratch memory(static_cast<size_t>(num_rows * depth) * sizeof(float));
    float* rows = memory.as<float>();
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int64_t first = tiles.start(tile);
            const int size = tiles.size(tile);
            float* to = rows + first * depth;
            for (int row = 0; row < size; ++row) {
                const float* from = input + (first + row) * input_stride;
                for (int64_t k = 0; k < depth; ++k) to[k * size + row] = from[k];
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < work.count(); ++item) {
            int64_t panel = work.first_panel(item);
            if (few_rows && panel + kPanelsAtOnce <= num_panels) {
                multiply_few(static_cast<int>(num_rows), product, rows, panel);
                continue;
            }
            const int64_t wanted = panel + work.panels_per_item;
            const int64_t end = wanted < num_panels ? wanted : num_panels;
            for (; panel < end; ++panel) {
                for (int64_t tile = work.first_tile(item); tile < work.end_tile(item); ++tile) {
                    const int64_t first = tiles.start(tile);
                    multiply_tile<kMaxRows>(tiles.size(tile), product, rows + first * depth, first,
                                            panel);
                }
            }
        }
    }
}
