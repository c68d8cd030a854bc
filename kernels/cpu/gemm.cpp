// output[m, n] = input[m, k] x weight[n, k]^T + bias[n] in float32, with weights in panels.
//
// Every output is one chain of fused multiply-adds over the whole depth, so its bits do not depend
// on the number of rows, nor on the tiles, nor on the number of threads. Nor do they on whether
// weights that are bfloat16 values lie in the panels as float32 or as bfloat16.

#include "gemm.h"

#include "scratch.h"

namespace {

// How far ahead weights are fetched that are read once, in steps of depth: by panels one after
// another, and by several at once.
constexpr int kPrefetchSteps = 64, kPrefetchStepsOfEach = 32;

// A step of depth of a panel, as the two vectors of its columns, and where a column lies in it.
// bfloat16 values lie so that a little-endian word has one of each vector: either takes a single
// operation to become float32.
CBATCH_INLINE void load_step(const float* step, Vec* weight) {
    weight[0] = load(step);
    weight[1] = load(step + kWidth);
}

CBATCH_INLINE void load_step(const BFloat16* step, Vec* weight) {
    const UintVec words = *reinterpret_cast<const UnalignedUintVec*>(step);
    weight[0] = (Vec)(words << 16);
    weight[1] = (Vec)(words & 0xFFFF0000u);
}

template <class Weight>
constexpr int place_in_step(int column) {
    if (sizeof(Weight) == sizeof(float)) return column;
    return column < kWidth ? 2 * column : 2 * (column - kWidth) + 1;
}

// Puts a value where it is packed; returns the bits that are lost.
CBATCH_INLINE uint32_t put(float value, float* to) {
    *to = value;
    return 0;
}

CBATCH_INLINE uint32_t put(float value, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    to->bits = static_cast<uint16_t>(bits >> 16);
    return bits & 0xFFFF;
}

template <class Weight>
struct Product {
    const Weight* panels;
    const float* bias;  // or null
    float* output;
    int64_t depth, num_columns, output_stride;
};

// Step k of `input` holds ROWS values. Computes ROWS x (PANELS x kPanel) outputs.
template <int ROWS, int PANELS, int LOCALITY, class Weight>
CBATCH_INLINE void multiply(const Product<Weight>& product, const float* input, int64_t first_row,
                            int64_t first_panel, NextWeights next) {
    constexpr int kVectors = 2 * PANELS, kColumns = PANELS * kPanel;
    constexpr int kLine = 64 / sizeof(Weight), kLines = kPanel > kLine ? kPanel / kLine : 1;
    const int64_t depth = product.depth, column = first_panel * kPanel;
    const Weight* panels = product.panels + first_panel * kPanel * depth;
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
        for (int panel = 0; panel < PANELS; ++panel) {
            const Weight* step = panels + (panel * depth + k) * kPanel;
            load_step(step, weight + 2 * panel);
            if constexpr (PANELS > 1) {
                CBATCH_UNROLL
                for (int line = 0; line < kLines; ++line) {
                    const Weight* ahead = step + kPrefetchStepsOfEach * kPanel + line * kLine;
                    __builtin_prefetch(ahead, 0, LOCALITY);
                }
            }
        }
        if constexpr (PANELS == 1) next.fetch<kLines, LOCALITY>(k);
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

template <int ROWS, int LOCALITY, class Weight>
void multiply_tile(int num_rows, const Product<Weight>& product, const float* input,
                   int64_t first_row, int64_t panel, NextWeights next) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1, LOCALITY>(product, input, first_row, panel, next);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1, LOCALITY>(num_rows, product, input, first_row, panel, next);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`.
template <class Weight>
void multiply_panel(const Product<Weight>& product, const float* rows, const RowTiles& tiles,
                    int64_t first_tile, int64_t end_tile, int64_t panel, int64_t panels_ahead) {
    const int64_t depth = product.depth, num_tiles = end_tile - first_tile;
    // A single tile reads its panel once: what it needs next is a little further on.
    const int64_t steps_ahead = num_tiles == 1 ? kPrefetchSteps : panels_ahead * depth;
    const Weight* ahead = product.panels + (panel * depth + steps_ahead) * kPanel;
    const auto multiply = num_tiles <= kFewTiles ? multiply_tile<kMaxRows, 2, Weight>
                                                             : multiply_tile<kMaxRows, 3, Weight>;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        const int64_t first = tiles.start(tile);
        multiply(tiles.size(tile), product, rows + first * depth, first, panel,
                 NextWeights(ahead, kPanel * sizeof(Weight), depth, tile - first_tile, num_tiles));
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

template <class Weight>
void multiply_few(int num_rows, const Product<Weight>& product, const float* input, int64_t panel) {
    const NextWeights none(nullptr, 0, 1, 0, 1);
    if (num_rows == 1) {
        multiply<1, 4, 2>(product, input, 0, panel, none);
    } else {
        multiply<2, 2, 2>(product, input, 0, panel, none);
        multiply<2, 2, 2>(product, input, 0, panel + 2, none);
    }
}

// Returns the bits that are lost.
template <class Weight>
uint32_t pack_panels(const float* weight, int64_t num_columns, int64_t depth, Weight* packed,
                     int64_t num_threads) {
    const int64_t num_panels = ceil_div(num_columns, kPanel);
    uint32_t lost = 0;
#pragma omp parallel for schedule(static) reduction(| : lost) \
    num_threads(static_cast<int>(num_threads))
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        Weight* to = packed + panel * kPanel * depth;
        for (int column = 0; column < kPanel; ++column) {
            const int64_t index = panel * kPanel + column;
            Weight* column_of_panel = to + place_in_step<Weight>(column);
            for (int64_t k = 0; k < depth; ++k) {
                const float value = index < num_columns ? weight[index * depth + k] : 0.0f;
                lost |= put(value, column_of_panel + k * kPanel);
            }
        }
    }
    return lost;
}

template <class Weight>
void multiply_all(const float* input, int64_t input_stride, int64_t num_rows,
                  const Product<Weight>& product, int64_t num_threads) {
    const int64_t depth = product.depth;
    const RowTiles tiles(num_rows);
    const int64_t num_panels = ceil_div(product.num_columns, kPanel);
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

}  // namespace

// `packed` holds ceil(num_columns / kPanel) * kPanel * depth floats.
CBATCH_EXPORT(pack_linear)(const float* weight, int64_t num_columns, int64_t depth, float* packed,
                           int64_t num_threads) {
    pack_panels(weight, num_columns, depth, packed, num_threads);
}

// As many bfloat16, with the bits that are lost in `lost`: 0 if all are bfloat16 values.
CBATCH_EXPORT(pack_linear_bfloat16)(const float* weight, int64_t num_columns, int64_t depth,
                                    BFloat16* packed, int64_t* lost, int64_t num_threads) {
    *lost = pack_panels(weight, num_columns, depth, packed, num_threads);
}

// The bits that bfloat16 lacks; each thread stops soon after the first value that has any.
CBATCH_EXPORT(bits_beyond_bfloat16)(const float* values, int64_t count, int64_t* found,
                                    int64_t num_threads) {
    constexpr int64_t kAtOnce = 4096;
    uint32_t bits = 0;
#pragma omp parallel for schedule(static) reduction(| : bits) \
    num_threads(static_cast<int>(num_threads))
    for (int64_t start = 0; start < count; start += kAtOnce) {
        if (bits != 0) continue;
        const int64_t end = start + kAtOnce < count ? start + kAtOnce : count;
        BFloat16 upper;
        for (int64_t i = start; i < end; ++i) bits |= put(values[i], &upper);
    }
    *found = bits;
}

CBATCH_EXPORT(linear)(const float* input, int64_t input_stride, int64_t num_rows, int64_t depth,
                      const float* packed, const float* bias, int64_t num_columns, float* output,
                      int64_t output_stride, int64_t num_threads) {
    const Product<float> product{packed, bias, output, depth, num_columns, output_stride};
    multiply_all(input, input_stride, num_rows, product, num_threads);
}

CBATCH_EXPORT(linear_bfloat16)(const float* input, int64_t input_stride, int64_t num_rows,
                               int64_t depth, const BFloat16* packed, const float* bias,
                               int64_t num_columns, float* output, int64_t output_stride,
                               int64_t num_threads) {
    const Product<BFloat16> product{packed, bias, output, depth, num_columns, output_stride};
    multiply_all(input, input_stride, num_rows, product, num_threads);
}
