// int8 weights times int16 activations, summed exactly in int32: what every use of it shares.
//
// Weights have one scale per output column and group of depths, activations one per row. The sums of
// a group cannot overflow, |sum| <= kMostDepthsPerGroup * 127 * kLargest, and are exact; scaled, they
// are added in float32 group by group, so a row's bits do not depend on its neighbours.
#pragma once

#include <cmath>

#include "gemm.h"

namespace {

typedef int16_t PairVec __attribute__((vector_size(4 * kWidth)));
typedef int16_t ShortVec __attribute__((vector_size(2 * kWidth)));
typedef int8_t WeightBytes __attribute__((vector_size(2 * kWidth)));
typedef int8_t UnalignedWeightBytes __attribute__((vector_size(2 * kWidth), aligned(1), may_alias));

// How far ahead weights are fetched that are read once, in pairs of depth.
constexpr int kPrefetchSteps = 16;

// What the largest activation of a row becomes.
constexpr float kLargest = 32767.0f;
constexpr int64_t kMostDepthsPerGroup = 512;

struct Int8Product {
    const int8_t* panels;  // [panel, depth / 2, kPanel, 2]
    const float* scales;   // [group, panel, kPanel]
    const float* row_scales;
    int64_t num_pairs, num_columns, pairs_per_group;

    int64_t num_panels() const { return ceil_div(num_columns, kPanel); }
};

CBATCH_INLINE PairVec load_pairs(const int8_t* from) {
#if defined(__AVX512F__)
    return (PairVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i_u*)from));
#elif defined(__AVX2__)
    return (PairVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i_u*)from));
#else
    const WeightBytes bytes = *reinterpret_cast<const UnalignedWeightBytes*>(from);
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

// Pair k of `input` holds ROWS pairs of int16. `finish` gets [ROWS][2 * PANELS] vectors of
// outputs, without a bias, and the scales to multiply them by.
template <int ROWS, int PANELS, class Finish>
CBATCH_INLINE void multiply(const Int8Product& product, const int16_t* input, int64_t first_row,
                            int64_t first_panel, NextWeights next, const Finish& finish) {
    constexpr int kVectors = 2 * PANELS;
    const int64_t num_pairs = product.num_pairs;
    const int8_t* panels = product.panels + first_panel * num_pairs * 2 * kPanel;
    const float* scales = product.scales + first_panel * kPanel;
    const int64_t scale_stride = product.num_panels() * kPanel;
    Vec totals[ROWS][kVectors];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) totals[row][v] = Vec{};
    }
    for (int64_t first = 0; first < num_pairs; first += product.pairs_per_group) {
        const int64_t wanted = first + product.pairs_per_group;
        const int64_t end = wanted < num_pairs ? wanted : num_pairs;
        IntVec sums[ROWS][kVectors];
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[row][v] = IntVec{};
        }
        for (int64_t k = first; k < end; ++k) {
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
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const Vec scale = load(scales + v * kWidth);
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                totals[row][v] += __builtin_convertvector(sums[row][v], Vec) * scale;
            }
        }
        scales += scale_stride;
    }
    finish(totals, product.row_scales + first_row);
}

template <int ROWS = kMaxRows, class Finish>
void multiply_tile(int num_rows, const Int8Product& product, const int16_t* input,
                   int64_t first_row, int64_t panel, NextWeights next, const Finish& finish) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1>(product, input, first_row, panel, next, finish);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1>(num_rows, product, input, first_row, panel, next, finish);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`; `finish_of` gives, for the first
// row of a tile, what its sums are for.
template <class FinishOf>
void multiply_panel(const Int8Product& product, const int16_t* rows, const RowTiles& tiles,
                    int64_t first_tile, int64_t end_tile, int64_t panel, int64_t panels_ahead,
                    const FinishOf& finish_of) {
    const int64_t num_pairs = product.num_pairs, num_tiles = end_tile - first_tile;
    // A single tile reads its panel once: what it needs next is a little further on.
    const int64_t pairs_ahead = num_tiles == 1 ? kPrefetchSteps : panels_ahead * num_pairs;
    const int8_t* ahead = product.panels + (panel * num_pairs + pairs_ahead) * 2 * kPanel;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        const int64_t first = tiles.start(tile);
        multiply_tile(tiles.size(tile), product, rows + first * 2 * num_pairs, first, panel,
                      NextWeights(ahead, 2 * kPanel, num_pairs, tile - first_tile, num_tiles),
                      finish_of(first));
    }
}

// The nearest integers, ties to even, of values below 2^22.
CBATCH_INLINE IntVec nearest(Vec values) {
    const float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return (IntVec)(values + kRounder) - 0x4B400000;
}

// Writes one row as int16 at stride `num_rows` pairs; returns its scale. A row with values that
// are not finite gets a scale that is not a number, so that its outputs tell.
float quantize_row(const float* from, int64_t depth, int num_rows, int16_t* to) {
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
    const float inverse = is_finite && highest > 0.0f ? kLargest / highest : 0.0f;
    for (int64_t k = 0; k < depth; k += kWidth) {
        Vec scaled = is_finite ? values(k) * inverse : Vec{};
        scaled = scaled > kLargest ? splat(kLargest) : scaled;
        scaled = scaled < -kLargest ? splat(-kLargest) : scaled;
        const ShortVec rounded = __builtin_convertvector(nearest(scaled), ShortVec);
        const int64_t num_pairs = k < whole ? kWidth / 2 : (depth - whole + 1) / 2;
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
            std::memcpy(to + (k / 2 + pair) * 2 * num_rows,
                        reinterpret_cast<const char*>(&rounded) + pair * sizeof(int32_t),
                        sizeof(int32_t));
        }
    }
    return is_finite ? highest / kLargest : __builtin_nanf("");
}

// The rows of one tile, whose pairs lie side by side.
inline void quantize_tile(const float* input, int64_t input_stride, int64_t depth,
                          const RowTiles& tiles, int64_t tile, int16_t* rows, float* row_scales) {
    const int64_t first = tiles.start(tile), num_pairs = ceil_div(depth, 2);
    const int size = tiles.size(tile);
    int16_t* to = rows + first * 2 * num_pairs;
    for (int row = 0; row < size; ++row) {
        row_scales[first + row] = quantize_row(input + (first + row) * input_stride, depth, size,
                                               to + 2 * row);
    }
}

}  // namespace
