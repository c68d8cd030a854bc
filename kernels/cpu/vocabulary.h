// A vocabulary in which the largest outputs are searched, and the bounds of outputs.
#pragma once

#include <cmath>
#include <limits>

#include "rounded_rows.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The panel of the highest bound that a row has anywhere; none is -1.
struct Peak {
    float bound;
    int64_t panel;

    // Of equal bounds the first panel.
    CBATCH_INLINE void take(float other, int64_t other_panel) {
        if (other > bound || (other == bound && other_panel < panel)) {
            bound = other;
            panel = other_panel;
        }
    }
};

// How far an output may lie from the float32 product's, per unit of a column's error and norm.
struct RowBound {
    float norm, error;
};

// What is searched. What belongs to columns is padded to whole panels.
struct Vocabulary {
    InputRows input;
    int64_t num_columns;
    const float* bias;  // -inf for columns that only fill a panel
    float* best;        // [num_rows], as are the following
    int64_t* best_columns;
    int64_t* num_exact;
    // The rest is for outputs of the float32 product.
    const float* weight;         // [num_columns, depth]
    const float* column_errors;  // per unit of a row's norm
    const float* column_norms;   // per unit of a row's error
    float largest_norm;          // of a column, of those that are finite
    RowBound* row_bounds;        // [num_rows], found on the way

    int64_t num_panels() const { return ceil_div(num_columns, kPanel); }
    CBATCH_INLINE Vec distance(int64_t column, int64_t row) const {
        return load(column_errors + column) * row_bounds[row].norm +
               load(column_norms + column) * row_bounds[row].error;
    }
};

// The bound of a row that rounding changed so, in a product of so many groups.
RowBound bound_row(const RowChanges& changes, int64_t num_groups, float largest_norm) {
    // More than the roundings of an output beside its groups', and than those of the bounds.
    const double kFewRoundings = 8.0, kMargin = 1.001, kUnitRoundoff = 0x1p-24;
    // Products of two such bounds are above all that is lost below the smallest float32.
    const double kLeast = 0x1p-64;
    // Below it no part of either product overflows.
    const double kMostSafe = 0x1p90;
    const double norm = std::sqrt(changes.values);
    const double size = std::sqrt(changes.spreads) + std::sqrt(changes.middles);
    const double sums = (2.0 * static_cast<double>(num_groups) + kFewRoundings) * kUnitRoundoff;
    const double error = std::sqrt(changes.errors) + sums * size;
    const double most = std::fmax(std::fmax(norm, size), 1.0) * std::fmax(largest_norm, 1.0f);
    return {most < kMostSafe ? static_cast<float>(std::fmax(norm * kMargin, kLeast)) : kInfinity,
            static_cast<float>(std::fmax(error * kMargin, kLeast))};
}

// Keeps the largest upper bound of each row of a tile and, by lanes, its largest lower bound; where
// bounds are not the outputs themselves, also where the highest one is.
template <bool IS_EXACT>
struct KeepBounds {
    const Vocabulary& vocabulary;
    int64_t first_row, panel;
    float* upper;   // of the panel, by rows
    float* lowest;  // [row, kWidth]
    Peak* peaks;    // by rows

    template <int ROWS, int VECTORS>
    CBATCH_INLINE void operator()(const Vec (&totals)[ROWS][VECTORS],
                                  const float* row_scales) const {
        CBATCH_UNROLL
        for (int index = 0; index < ROWS; ++index) {
            const int64_t row = first_row + index;
            Vec high = splat(-kInfinity), low = load(lowest + row * kWidth);
            IntVec is_nan = {};
            CBATCH_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t at = panel * kPanel + v * kWidth;
                const Vec value = multiply_add(totals[index][v], splat(row_scales[index]),
                                               load(vocabulary.bias + at));
                Vec highest = value;
                if constexpr (IS_EXACT) {
                    const Vec distance = vocabulary.distance(at, row);
                    highest = value + distance;
                    low = maximum(value - distance, low);
                } else {
                    low = maximum(value, low);
                }
                high = maximum(highest, high);
                is_nan |= highest != highest;
            }
            store(lowest + row * kWidth, low);
            // What is not a number is not below anything.
            upper[row] = any_lane(is_nan) ? kInfinity : max_lanes(high);
            if constexpr (IS_EXACT) peaks[row].take(upper[row], panel);
        }
    }
};

// Writes the outputs of one row and one panel, with their upper bounds.
template <bool IS_EXACT>
struct KeepOutputs {
    const Vocabulary& vocabulary;
    int64_t row, panel;
    float* values;
    float* highest;

    template <int VECTORS>
    CBATCH_INLINE void operator()(const Vec (&totals)[1][VECTORS],
                                  const float* row_scales) const {
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t at = panel * kPanel + v * kWidth;
            const Vec value =
                multiply_add(totals[0][v], splat(row_scales[0]), load(vocabulary.bias + at));
            store(values + v * kWidth, value);
            if constexpr (IS_EXACT) {
                store(highest + v * kWidth, value + vocabulary.distance(at, row));
            }
        }
    }
};

}  // namespace
