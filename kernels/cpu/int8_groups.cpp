// Products of 8-bit weights and 8-bit activations, see int8_groups.h for their format.
//
// Sums within a group are of integers, hence exact and the same in every variant. Groups are added
// in order, so a row's bits do not depend on its neighbours.

#include <cmath>

#include "int8_groups_product.h"
#include "int8_rounding.h"
#include "scratch.h"
#include "store_tile.h"

namespace {

// Sums of squares of a column of the weight, and of what rounding changed in it.
struct ColumnChanges {
    double values = 0.0, errors = 0.0;
};

// Rounds one group of a column of the weight into its place in the steps of a panel.
void pack_group(const float* from, int count, int num_quads, int column, uint8_t* steps,
                ColumnChanges* changes) {
    float highest = 0.0f, zeros = 0.0f;
    for (int k = 0; k < count; ++k) {
        highest = std::fmax(highest, std::fabs(from[k]));
        zeros += from[k] * 0.0f;
    }
    // A column with weights that are not finite tells by its outputs.
    const bool is_finite = zeros == 0.0f;
    const float scale = is_finite ? highest / 127.0f : __builtin_nanf("");
    const float divisor = scale > 0.0f ? scale : 1.0f;
    // The scale of tiny weights has few bits itself: they may be above 127 of it.
    const auto round = [&](float value) {
        return std::fmin(std::fmax(__builtin_nearbyintf(value / divisor), -127.0f), 127.0f);
    };
    int32_t sum = 0;
    for (int k = 0; k < num_quads * kQuad; ++k) {
        const float value = k < count ? from[k] : 0.0f;
        const int32_t rounded = is_finite ? static_cast<int32_t>(round(value)) : 0;
        const double error = static_cast<double>(scale) * rounded - value;
        changes->values += static_cast<double>(value) * value;
        changes->errors += error * error;
        steps[k / kQuad * kStepBytes + column * kQuad + k % kQuad] =
            static_cast<uint8_t>(rounded + 128);
        sum += rounded;
    }
    const float scaled_sum = scale * static_cast<float>(sum);
    uint8_t* scales = steps + num_quads * kStepBytes + column * sizeof(float);
    std::memcpy(scales, &scale, sizeof(scale));
    std::memcpy(scales + kStepBytes, &scaled_sum, sizeof(scaled_sum));
}

}  // namespace

// `packed` holds ceil(num_columns / kPanel) panels of kPanel * (ceil(depth / 4) * 4 +
// ceil(depth / kGroup) * 8) bytes; `errors` and `norms` are those of the columns' roundings.
CBATCH_EXPORT(pack_int8_groups)(const float* weight, int64_t num_columns, int64_t depth,
                                uint8_t* packed, float* errors, float* norms,
                                int64_t num_threads) {
    const Groups groups(depth);
    const int64_t num_panels = ceil_div(num_columns, kPanel);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        uint8_t* to = packed + panel * groups.panel_bytes();
        std::memset(to, 0, static_cast<size_t>(groups.panel_bytes()));
        for (int column = 0; column < kPanel && panel * kPanel + column < num_columns; ++column) {
            const int64_t index = panel * kPanel + column;
            const float* from = weight + index * depth;
            ColumnChanges changes;
            for (int64_t group = 0; group < groups.count; ++group) {
                const int64_t steps = group * (kQuadsPerGroup + kStepsOfScales);
                pack_group(from + group * kGroup, groups.depths_of(group), groups.quads_of(group),
                           column, to + steps * kStepBytes, &changes);
            }
            errors[index] = static_cast<float>(std::sqrt(changes.errors));
            norms[index] = static_cast<float>(std::sqrt(changes.values));
        }
    }
}

CBATCH_EXPORT(linear_int8_groups)(const float* input, int64_t input_stride, int64_t num_rows,
                                  int64_t depth, const uint8_t* packed, const float* bias,
                                  int64_t num_columns, float* output, int64_t output_stride,
                                  int64_t num_threads) {
    const Groups groups(depth);
    const int64_t num_panels = ceil_div(num_columns, kPanel);
    const size_t num_entries = static_cast<size_t>(num_rows * groups.count);
    const Scratch quad_memory(static_cast<size_t>(num_rows * groups.num_quads) * sizeof(RowQuad));
    const Scratch start_memory(num_entries * sizeof(int32_t));
    const Scratch scale_memory(2 * num_entries * sizeof(float));
    const RoundedRows rows{quad_memory.as<RowQuad>(), start_memory.as<int32_t>(),
                           scale_memory.as<float>(), scale_memory.as<float>() + num_entries};
    const GroupedProduct product{packed, rows, groups};
    const Outputs outputs{output, output_stride, num_columns, bias};
    const RowTiles tiles(num_rows, kMaxGroupedRows);
    const WorkSplit work(num_panels, num_rows == 1, tiles.count, num_threads);
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < tiles.count * groups.count; ++item) {
            const int64_t tile = item / groups.count;
            round_rows(input, input_stride, tiles.start(tile), tiles.size(tile), groups,
                       item % groups.count, rows);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < work.count(); ++item) {
            int64_t panel = work.first_panel(item);
            if (work.is_several(item)) {
                multiply<1, kPanelsAtOnce>(product, 0, panel, NextWeights(nullptr, 0, 1, 0, 1), true,
                                           StoreTile{outputs, 0, panel});
                continue;
            }
            for (; panel < work.end_panel(item); ++panel) {
                const auto store_from = [&](int64_t first_row) {
                    return StoreTile{outputs, first_row, panel};
                };
                multiply_panel(product, tiles, work.first_tile(item), work.end_tile(item), panel,
                               num_threads, store_from);
            }
        }
    }
}
