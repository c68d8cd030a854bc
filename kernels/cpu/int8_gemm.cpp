// Products with int8 weights and int16 activations, summed exactly in int32.
//
// Weights have one scale per output column, activations one per row, chosen so small that no sum
// can overflow: |sum| <= depth * 127 * largest. Sums of integers are exact, so a row's bits do not
// depend on its neighbours.

#include <cmath>

#include "gemm.h"
#include "scratch.h"

namespace {

typedef int16_t PairVec __attribute__((vector_size(4 * kWidth)));
typedef int16_t ShortVec __attribute__((vector_size(2 * kWidth)));
typedef int8_t ByteVec __attribute__((vector_size(2 * kWidth)));
typedef int8_t UnalignedByteVec __attribute__((vector_size(2 * kWidth), aligned(1), may_alias));

// How far ahead weights are fetched that are read once, in pairs of depth.
constexpr int kPrefetchSteps = 16;

struct Int8Product {
    const int8_t* panels;  // [panel, depth / 2, kPanel, 2]
    const float* column_scales;
    const float* bias;  // or null
    const float* row_scales;
    float* output;
    int64_t num_pairs, num_columns, output_stride;
};

CBATCH_INLINE PairVec load_pairs(const int8_t* from) {
#if defined(__AVX512F__)
    return (PairVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i_u*)from));
#elif defined(__AVX2__)
    return (PairVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i_u*)from));
#else
    const ByteVec bytes = *reinterpret_cast<const UnalignedByteVec*>(from);
    return __builtin_convertvector(bytes, PairVec);
#endif
}

// sums[i] + a[2i] * pair[0] + a[2i + 1] * pair[1]; `pair` is two int16 in one int32.
CBATCH_INLINE IntVec add_products(IntVec sums, PairVec weights, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    const __m256i products = _mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
    return sums + (IntVec)products;
#else
    const int32_t low = static_cast<int16_t>(pair & 0xFFFF), high = pair >> 16;
    const IntVec both = (IntVec)weights;
    return sums + ((both << 16) >> 16) * low + (both >> 16) * high;
#endif
}

// Pair k of `input` holds ROWS pairs of int16.
template <int ROWS, int PANELS>
CBATCH_INLINE void multiply(const Int8Product& product, const int16_t* input, int64_t first_row,
                            int64_t first_panel, NextWeights next) {
    constexpr int kVectors = 2 * PANELS;
    const int64_t num_pairs = product.num_pairs;
    const int8_t* panels = product.panels + first_panel * num_pairs * 2 * kPanel;
    IntVec sums[ROWS][kVectors];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[row][v] = IntVec{};
    }
    for (int64_t k = 0; k < num_pairs; ++k) {
        PairVec weight[kVectors];
        CBATCH_UNROLL
        for (int panel = 0; panel < PANELS; ++panel) {
            const int8_t* step = panels + (panel * num_pairs + k) * 2 * kPanel;
            weight[2 * panel] = load_pairs(step);
            weight[2 * panel + 1] = load_pairs(step + kPanel);
            if constexpr (PANELS > 1) __builtin_prefetch(step + kPrefetchSteps * 2 * kPanel);
        }
        if constexpr (PANELS == 1) next.fetch<1>(k);
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            int32_t pair;
            std::memcpy(&pair, input + 2 * (k * ROWS + row), sizeof(pair));
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                sums[row][v] = add_products(sums[row][v], weight[v], pair);
            }
        }
    }
    constexpr int kColumns = PANELS * kPanel;
    const int64_t column = first_panel * kPanel;
    const int64_t left = product.num_columns - column;
    const bool is_whole = left >= kColumns;
    const float* scales = product.column_scales + column;
    const float* bias = product.bias == nullptr ? nullptr : product.bias + column;
    float* output = product.output + first_row * product.output_stride + column;
    int64_t stride = product.output_stride;
    // The last columns are computed by the same code over padded copies: the same bits.
    float padded_scales[kColumns], padded_bias[kColumns], tile[ROWS * kColumns];
    if (!is_whole) {
        for (int64_t i = 0; i < kColumns; ++i) {
            padded_scales[i] = i < left ? scales[i] : 0.0f;
            padded_bias[i] = i < left && bias != nullptr ? bias[i] : 0.0f;
        }
        scales = padded_scales;
        bias = bias == nullptr ? nullptr : padded_bias;
        output = tile;
        stride = kColumns;
    }
    CBATCH_UNROLL
    for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load(scales + v * kWidth);
        const Vec offset = bias == nullptr ? Vec{} : load(bias + v * kWidth);
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            const Vec sum = __builtin_convertvector(sums[row][v], Vec);
            store(output + row * stride + v * kWidth,
                  sum * (scale * product.row_scales[first_row + row]) + offset);
        }
    }
    if (is_whole) return;
    output = product.output + first_row * product.output_stride + column;
    for (int row = 0; row < ROWS; ++row) {
        for (int64_t i = 0; i < left; ++i) {
            output[row * product.output_stride + i] = tile[row * kColumns + i];
        }
    }
}

template <int ROWS>
void multiply_tile(int num_rows, const Int8Product& product, const int16_t* input,
                   int64_t first_row, int64_t panel, NextWeights next) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1>(product, input, first_row, panel, next);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1>(num_rows, product, input, first_row, panel, next);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`.
void multiply_panel(const Int8Product& product, const int16_t* rows, const RowTiles& tiles,
                    int64_t first_tile, int64_t end_tile, int64_t panel, int64_t panels_ahead) {
    const int64_t num_pairs = product.num_pairs, num_tiles = end_tile - first_tile;
    // A single tile reads its panel once: what it needs next is a little further on.
    const int64_t pairs_ahead = num_tiles == 1 ? kPrefetchSteps : panels_ahead * num_pairs;
    const int8_t* ahead = product.panels + (panel * num_pairs + pairs_ahead) * 2 * kPanel;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        const int64_t first = tiles.start(tile);
        multiply_tile<kMaxRows>(
            tiles.size(tile), product, rows + first * 2 * num_pairs, first, panel,
            NextWeights(ahead, 2 * kPanel, num_pairs, tile - first_tile, num_tiles));
    }
}

constexpr int kPanelsAtOnce = 4;

// The nearest integers, ties to even, of values below 2^22.
CBATCH_INLINE IntVec nearest(Vec values) {
    const float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return (IntVec)(values + kRounder) - 0x4B400000;
}

// Writes one row as int16 at stride `num_rows` pairs; returns its scale. A row with values that
// are not finite gets a scale that is not a number, so that its outputs tell.
float quantize_row(const float* from, int64_t depth, float largest, int num_rows, int16_t* to) {
    // The last values are handled by the same code over a padded copy.
    float rest[kWidth] = {};
    const int64_t whole = depth / kWidth * kWidth;
    std::memcpy(rest, from + whole, static_cast<size_t>(depth - whole) * sizeof(float));
    const auto values = [&](int64_t k) __attribute__((always_inline)) {
        return load(k < whole ? from + k : rest);
    };
    Vec highest_lanes = {}, finite_lanes = {};
    for (int64_t k = 0; k < depth; k += kWidth) {
        const Vec value = values(k);
        highest_lanes = maximum(maximum(value, -value), highest_lanes);
        finite_lanes += value * 0.0f;
    }
    const float highest = max_lanes(highest_lanes);
    const bool is_finite = sum_lanes(finite_lanes) == 0.0f;
    const float inverse = is_finite && highest > 0.0f ? largest / highest : 0.0f;
    for (int64_t k = 0; k < depth; k += kWidth) {
        Vec scaled = is_finite ? values(k) * inverse : Vec{};
        scaled = scaled > largest ? splat(largest) : scaled;
        scaled = scaled < -largest ? splat(-largest) : scaled;
        const ShortVec rounded = __builtin_convertvector(nearest(scaled), ShortVec);
        const int64_t num_pairs = k < whole ? kWidth / 2 : (depth - whole + 1) / 2;
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            std::memcpy(to + (k / 2 + pair) * 2 * num_rows,
                        reinterpret_cast<const char*>(&rounded) + pair * sizeof(int32_t),
                        sizeof(int32_t));
        }
    }
    return is_finite ? highest / largest : __builtin_nanf("");
}

// What rounding did to a column of the weight.
struct Rounded {
    float scale, error, norm;  // the latter two are Euclidean norms
};

Rounded round_column(const float* from, int64_t depth, int8_t* to) {
    Vec highest_lanes = {};
    float highest = 0.0f;
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
        const Vec value = load(from + k);
        highest_lanes = maximum(maximum(value, -value), highest_lanes);
    }
    for (; k < depth; ++k) highest = std::fmax(highest, std::fabs(from[k]));
    highest = std::fmax(highest, max_lanes(highest_lanes));
    const float scale = highest / 127.0f, divisor = scale > 0.0f ? scale : 1.0f;
    double errors = 0.0, squares = 0.0;
    for (k = 0; k < depth; ++k) {
        const float rounded = __builtin_nearbyintf(from[k] / divisor);
        const double error = static_cast<double>(from[k]) - static_cast<double>(rounded) * scale;
        to[k] = static_cast<int8_t>(rounded);
        errors += error * error;
        squares += static_cast<double>(from[k]) * from[k];
    }
    return {scale, static_cast<float>(std::sqrt(errors)), static_cast<float>(std::sqrt(squares))};
}

}  // namespace

// One scale per column; `errors` and `norms` are those of the columns' roundings.
CBATCH_EXPORT(round_int8)(const float* weight, int64_t num_columns, int64_t depth,
                          int8_t* rounded, float* scales, float* errors, float* norms,
                          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t column = 0; column < num_columns; ++column) {
        const Rounded result =
            round_column(weight + column * depth, depth, rounded + column * depth);
        scales[column] = result.scale;
        errors[column] = result.error;
        norms[column] = result.norm;
    }
}

// `packed` holds ceil(num_columns / kPanel) * kPanel * 2 * ceil(depth / 2) bytes.
CBATCH_EXPORT(pack_int8)(const int8_t* weight, int64_t num_columns, int64_t depth, int8_t* packed,
                         int64_t num_threads) {
    const int64_t num_panels = ceil_div(num_columns, kPanel), num_pairs = ceil_div(depth, 2);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        int8_t* to = packed + panel * kPanel * 2 * num_pairs;
        for (int column = 0; column < kPanel; ++column) {
            const int64_t index = panel * kPanel + column;
            for (int64_t k = 0; k < 2 * num_pairs; ++k) {
                to[(k / 2 * kPanel + column) * 2 + k % 2] =
                    index < num_columns && k < depth ? weight[index * depth + k] : int8_t{0};
            }
        }
    }
}

CBATCH_EXPORT(linear_int8)(const float* input, int64_t input_stride, int64_t num_rows,
                           int64_t depth, const int8_t* packed, const float* column_scales,
                           const float* bias, int64_t num_columns, float* output,
                           int64_t output_stride, int64_t num_threads) {
    const int64_t num_pairs = ceil_div(depth, 2), num_panels = ceil_div(num_columns, kPanel);
    const int64_t bound = INT32_MAX / (127 * depth);
    const float largest = static_cast<float>(bound < 32767 ? bound : 32767);
    const Scratch row_memory(static_cast<size_t>(num_rows * num_pairs) * sizeof(int32_t));
    const Scratch scale_memory(static_cast<size_t>(num_rows) * sizeof(float));
    int16_t* rows = row_memory.as<int16_t>();
    float* row_scales = scale_memory.as<float>();
    const Int8Product product{packed,    column_scales, bias,        row_scales,
                              output,    num_pairs,     num_columns, output_stride};
    const RowTiles tiles(num_rows);
    const bool one_row = num_rows == 1;
    const WorkSplit work(num_panels, one_row ? kPanelsAtOnce : 1, tiles.count, num_threads);
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int64_t first = tiles.start(tile);
            const int size = tiles.size(tile);
            int16_t* to = rows + first * 2 * num_pairs;
            for (int row = 0; row < size; ++row) {
                row_scales[first + row] = quantize_row(input + (first + row) * input_stride, depth,
                                                       largest, size, to + 2 * row);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < work.count(); ++item) {
            int64_t panel = work.first_panel(item);
            if (one_row && panel + kPanelsAtOnce <= num_panels) {
                multiply<1, kPanelsAtOnce>(product, rows, 0, panel, NextWeights(nullptr, 0, 1, 0, 1));
                continue;
            }
            const int64_t wanted = panel + work.panels_per_item;
            const int64_t end = wanted < num_panels ? wanted : num_panels;
            for (; panel < end; ++panel) {
                multiply_panel(product, rows, tiles, work.first_tile(item), work.end_tile(item),
                               panel, num_threads);
            }
        }
    }
}
