// Rounds rows into the format of int8_groups.h.
#pragma once

#include "int8_groups.h"

namespace {

typedef int8_t ByteVec __attribute__((vector_size(kWidth)));

// How the values of a group of a row become integers.
struct Rounding {
    float middle, scale, inverse;  // a value becomes (value - middle) * inverse
    bool is_finite;
};

// The values of a group; if they end within a vector, a padded copy of them.
class GroupValues {
  public:
    GroupValues(const float* from, int count) : from_(from) {
        if (count % kWidth == 0) return;
        for (int k = 0; k < kGroup; ++k) padded_[k] = from[k < count ? k : count - 1];
        from_ = padded_;
    }
    CBATCH_INLINE Vec at(int k) const { return load(from_ + k); }

  private:
    const float* from_;
    float padded_[kGroup];
};

// A group with values that are not finite gets a scale that is not a number, so that its outputs
// tell.
Rounding choose_rounding(const GroupValues& values, int count) {
    Vec highest = values.at(0), lowest = -highest, zeros = {};
    for (int k = 0; k < count; k += kWidth) {
        const Vec value = values.at(k);
        highest = maximum(value, highest);
        lowest = maximum(-value, lowest);
        zeros += value * 0.0f;
    }
    if (sum_lanes(zeros) != 0.0f) return {0.0f, __builtin_nanf(""), 0.0f, false};
    const float top = max_lanes(highest), bottom = -max_lanes(lowest);
    const float middle = 0.5f * top + 0.5f * bottom;
    // The middle is rounded, so that one of the two ends may be further from it.
    const float above = top - middle, below = middle - bottom, half = above > below ? above : below;
    // Of smaller differences the inverse would be infinite.
    const float kSmallest = 1e-30f;
    return {middle, half / 127.0f, half > kSmallest ? 127.0f / half : 0.0f, true};
}

// Writes `count` values and zeros up to the next whole vector; returns their sum.
int32_t round_group(const GroupValues& values, int count, const Rounding& rounding, int8_t* to) {
    const float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    IntVec sums = {};
    for (int k = 0; k < count; k += kWidth) {
        const Vec value = (values.at(k) - rounding.middle) * rounding.inverse;
        const IntVec rounded = (IntVec)(value + kRounder) - 0x4B400000;
        const ByteVec bytes = __builtin_convertvector(rounded, ByteVec);
        std::memcpy(to + k, &bytes, sizeof(bytes));
        sums += rounded;
    }
    int32_t sum = static_cast<int32_t>(sum_lanes(__builtin_convertvector(sums, Vec)));
    // What was padded is the last value.
    for (int k = count; k % kWidth != 0; ++k) {
        sum -= to[count - 1];
        to[k] = 0;
    }
    return sum;
}

// Sums of squares of a row, and of what rounding changed in it.
struct RowChanges {
    double values = 0.0, errors = 0.0;

    void add(const float* from, int count, const Rounding& rounding, const int8_t* rounded) {
        const double scale = rounding.scale, middle = rounding.middle;
        for (int k = 0; k < count; ++k) {
            const double value = from[k], error = middle - value + scale * rounded[k];
            values += value * value;
            errors += error * error;
        }
    }
};

// One group of the rows of a tile. `changes` is of its rows, or null where nobody asks.
void round_rows(const float* input, int64_t stride, int64_t first_row, int num_rows,
                const Groups& groups, int64_t group, const RoundedRows& rows,
                RowChanges* changes = nullptr) {
    const int count = groups.depths_of(group), num_quads = groups.quads_of(group);
    RowQuad* quads =
        rows.quads + first_row * groups.num_quads + group * kQuadsPerGroup * num_rows;
    const int64_t entry = first_row * groups.count + group * num_rows;
    const auto values_of = [&](int row) {
        return GroupValues(input + (first_row + row) * stride + group * kGroup, count);
    };
    // Rows in turn: what one step takes of one row does not wait for the step before.
    Rounding roundings[kMaxGroupedRows];
    for (int row = 0; row < num_rows; ++row) {
        roundings[row] = choose_rounding(values_of(row), count);
        rows.scales[entry + row] = roundings[row].scale;
        rows.middles[entry + row] = roundings[row].middle;
    }
    for (int row = 0; row < num_rows; ++row) {
        int8_t values[kGroup];
        int32_t sum = 0;
        if (roundings[row].is_finite) {
            sum = round_group(values_of(row), count, roundings[row], values);
        } else {
            std::memset(values, 0, sizeof(values));
        }
        if (changes != nullptr) {
            const float* from = input + (first_row + row) * stride + group * kGroup;
            changes[row].add(from, count, roundings[row], values);
        }
        rows.starts[entry + row] = -128 * sum;
        RowQuad* to = quads + row;
        for (int k = 0; k < num_quads; ++k) {
            *to = row_quad(values + kQuad * k);
            to += num_rows;
            // A compiler that knew the stride would scatter, which takes longer.
            asm("" : "+r"(to));
        }
    }
}

}  // namespace
