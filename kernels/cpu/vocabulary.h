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

// How far a row's outputs may lie from the float32 product's, per unit of a panel's error and norm.
struct RowBound {
    float norm, error;
};

// What is searched.
struct Vocabulary {
    InputRows input;
    int64_t num_columns;
    const float* bias;  // padded to whole panels with -inf
    float* best;        // [num_rows], as are the following
    int64_t* best_columns;
    int64_t* num_exact;
    // The rest is for outputs of the float32 product.
    const float* weight;        // [num_columns, depth]
    const float* panel_errors;  // per unit of a row's norm: the largest of a panel's columns
    const float* panel_norms;   // per unit of a row's error
    float largest_norm;         // of a panel, of those that are finite
    RowBound* row_bounds;       // [num_rows], found on the way

    int64_t num_panels() const { return ceil_div(num_columns, kPanel); }
    // Between outputs of a panel; not a number or infinite where nothing is known.
    CBATCH_INLINE float distance(int64_t panel, int64_t row) const {
        return panel_errors[panel] * row_bounds[row].norm +
               panel_norms[panel] * row_bounds[row].error;
    }
};

// The bound of a row that rounding changed so.
RowBound bound_row(const RowChanges& changes, float largest_norm) {
    // For the roundings of the bounds themselves.
    const double kMargin = 1.001;
    // Products of two such bounds are above all that is lost below the smallest float32.
    const double kLeast = 0x1p-64;
    // Below it no part of either product overflows.
    const double kMostSafe = 0x1p90;
    const double norm = std::sqrt(changes.values), error = std::sqrt(changes.errors);
    const double most = std::fmax(norm, 1.0) * std::fmax(largest_norm, 1.0f);
    return {most < kMostSafe ? static_cast<float>(std::fmax(norm * kMargin, kLeast)) : kInfinity,
            static_cast<float>(std::fmax(error * kMargin, kLeast))};
}

// Keeps bounds of a panel's largest output for each row of a tile; where they are not that output
// itself, also in which panel the highest one is.
template <bool IS_EXACT>
struct KeepBounds {
    const Vocabulary& vocabulary;
    int64_t first_row, panel;
    float* upper;   // of the panel, by rows
    float* lowest;  // of all panels so far, by rows, as are the peaks
    Peak* peaks;

    template <int ROWS, int VECTORS>
    CBATCH_INLINE void operator()(const Vec (&totals)[ROWS][VECTORS],
                                  const float* row_scales) const {
        CBATCH_UNROLL
        for (int index = 0; index < ROWS; ++index) {
            const int64_t row = first_row + index;
            Vec highest = splat(-kInfinity);
            IntVec is_nan = {};
            CBATCH_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t at = panel * kPanel + v * kWidth;
                const Vec value = multiply_add(totals[index][v], splat(row_scales[index]),
                                               load(vocabulary.bias + at));
                highest = maximum(value, highest);
                is_nan |= value != value;
            }
            const float value = max_lanes(highest);
            const float distance = IS_EXACT ? vocabulary.distance(panel, row) : 0.0f;
            const float high = value + distance, low = value - distance;
            // What is not a number is not below anything.
            upper[row] = high != high || any_lane(is_nan) ? kInfinity : high;
            lowest[row] = low > lowest[row] ? low : lowest[row];
            if constexpr (IS_EXACT) peaks[row].take(upper[row], panel);
        }
    }
};

// Writes the outputs of one row and one panel.
struct KeepOutputs {
    const Vocabulary& vocabulary;
    int64_t panel;
    float* values;

    template <int VECTORS>
    CBATCH_INLINE void operator()(const Vec (&totals)[1][VECTORS],
                                  const float* row_scales) const {
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t at = panel * kPanel + v * kWidth;
            store(values + v * kWidth,
                  multiply_add(totals[0][v], splat(row_scales[0]), load(vocabulary.bias + at)));
        }
    }
};

}  // namespace
