// Products with int8 weights and int16 activations; see int8_product.h.

#include "int8_product.h"
#include "scratch.h"
#include "store_tile.h"

namespace {

// One scale per group of depths, at `scale_stride`; returns the norm of what rounding changed.
float round_column(const float* from, int64_t depth, int64_t group, int8_t* to, float* scales,
                   int64_t scale_stride) {
    double errors = 0.0;
    for (int64_t first = 0; first < depth; first += group) {
        const int64_t end = first + group < depth ? first + group : depth;
        float highest = 0.0f, finite = 0.0f;
        for (int64_t k = first; k < end; ++k) {
            highest = std::fmax(highest, std::fabs(from[k]));
            finite += from[k] * 0.0f;
        }
        const float scale = highest / 127.0f, divisor = scale > 0.0f ? scale : 1.0f;
        for (int64_t k = first; k < end; ++k) {
            // The scale of tiny weights has few bits itself: they may be above 127 of it.
            const float rounded =
                std::fmin(std::fmax(__builtin_nearbyintf(from[k] / divisor), -127.0f), 127.0f);
            const double error = static_cast<double>(from[k]) - static_cast<double>(rounded) * scale;
            to[k] = static_cast<int8_t>(rounded);
            errors += error * error;
        }
        // A column with weights that are not finite tells by its outputs.
        *scales = finite == 0.0f ? scale : __builtin_nanf("");
        scales += scale_stride;
    }
    return static_cast<float>(std::sqrt(errors));
}

}  // namespace

// One scale per column and group of depths, [group, column] at `scale_stride`; `errors` are the
// norms of what rounding changed in each column.
CBATCH_EXPORT(round_int8)(const float* weight, int64_t num_columns, int64_t depth, int64_t group,
                          int8_t* rounded, float* scales, int64_t scale_stride, float* errors,
                          int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t column = 0; column < num_columns; ++column) {
        errors[column] = round_column(weight + column * depth, depth, group,
                                      rounded + column * depth, scales + column, scale_stride);
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

// `scales` is [ceil(depth / group), columns padded to whole panels]; a group is even and at most
// kMostDepthsPerGroup.
CBATCH_EXPORT(linear_int8)(const float* input, int64_t input_stride, int64_t num_rows,
                           int64_t depth, const int8_t* packed, const float* scales,
                           const float* bias, int64_t num_columns, int64_t group, float* output,
                           int64_t output_stride, int64_t num_threads) {
    const int64_t num_pairs = ceil_div(depth, 2), num_panels = ceil_div(num_columns, kPanel);
    const Scratch row_memory(static_cast<size_t>(num_rows * num_pairs) * sizeof(int32_t));
    const Scratch scale_memory(static_cast<size_t>(num_rows) * sizeof(float));
    int16_t* rows = row_memory.as<int16_t>();
    float* row_scales = scale_memory.as<float>();
    const Int8Product product{packed, scales, row_scales, num_pairs, num_columns, group / 2};
    const Outputs outputs{output, output_stride, num_columns, bias};
    const RowTiles tiles(num_rows);
    const WorkSplit work(num_panels, num_rows == 1, tiles.count, num_threads);
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            quantize_tile(input, input_stride, depth, tiles, tile, rows, row_scales);
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < work.count(); ++item) {
            int64_t panel = work.first_panel(item);
            if (work.is_several(item)) {
                multiply<1, kPanelsAtOnce>(product, rows, 0, panel,
                                           NextWeights(nullptr, 0, 1, 0, 1),
                                           StoreTile{outputs, 0, panel});
                continue;
            }
            for (; panel < work.end_panel(item); ++panel) {
                const auto store_from = [&](int64_t first_row) {
                    return StoreTile{outputs, first_row, panel};
                };
                multiply_panel(product, rows, tiles, work.first_tile(item), work.end_tile(item),
                               panel, num_threads, store_from);
            }
        }
    }
}
