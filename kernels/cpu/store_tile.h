// Writes the outputs of a tile of rows and columns.
#pragma once

#include "gemm.h"

namespace {

struct Outputs {
    float* values;  // [row, num_columns] at `stride`
    int64_t stride, num_columns;
    const float* bias;  // or null
};

struct StoreTile {
    const Outputs& outputs;
    int64_t first_row, first_panel;

    template <int ROWS, int VECTORS>
    CBATCH_INLINE void operator()(const Vec (&totals)[ROWS][VECTORS],
                                  const float* row_scales) const {
        constexpr int kColumns = VECTORS * kWidth;
        const int64_t column = first_panel * kPanel, left = outputs.num_columns - column;
        const bool is_whole = left >= kColumns;
        const float* bias = outputs.bias == nullptr ? nullptr : outputs.bias + column;
        float* to = outputs.values + first_row * outputs.stride + column;
        int64_t stride = outputs.stride;
        // The last columns are computed by the same code over padded copies: the same bits.
        float padded_bias[kColumns], tile[ROWS * kColumns];
        if (!is_whole) {
            if (bias != nullptr) {
                for (int64_t i = 0; i < kColumns; ++i) padded_bias[i] = i < left ? bias[i] : 0.0f;
                bias = padded_bias;
            }
            to = tile;
            stride = kColumns;
        }
        CBATCH_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const Vec offset = bias == nullptr ? Vec{} : load(bias + v * kWidth);
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                store(to + row * stride + v * kWidth,
                      multiply_add(totals[row][v], splat(row_scales[row]), offset));
            }
        }
        if (is_whole) return;
        to = outputs.values + first_row * outputs.stride + column;
        for (int row = 0; row < ROWS; ++row) {
            for (int64_t i = 0; i < left; ++i) to[row * outputs.stride + i] = tile[row * kColumns + i];
        }
    }
};

}  // namespace
