// Products of 8-bit weights and 8-bit activations, see int8_groups.h for their format.
//
// Sums within a group are of integers, hence exact and the same in every variant. Groups are added
// in order, so a row's bits do not depend on its neighbours.

#include "int8_groups.h"

#include "int8_rounding.h"
#include "scratch.h"

namespace {

constexpr int kLinesPerStep = kStepBytes > 64 ? kStepBytes / 64 : 1;
// How far ahead weights are fetched that are read once, in steps.
constexpr int kPrefetchSteps = 16;
constexpr int64_t kFewTiles = 2;

struct GroupedProduct {
    const uint8_t* panels;
    const float* bias;  // or null
    RoundedRows rows;
    Groups groups;
    float* output;
    int64_t num_columns, output_stride;
};

template <int ROWS, int PANELS>
CBATCH_INLINE void multiply(const GroupedProduct& product, int64_t first_row, int64_t first_panel,
                            NextWeights next, bool few_tiles) {
    constexpr int kVectors = 2 * PANELS, kColumns = PANELS * kPanel;
    const Groups& groups = product.groups;
    const int64_t panel_bytes = groups.panel_bytes();
    const uint8_t* step = product.panels + first_panel * panel_bytes;
    const RowQuad* quads = product.rows.quads + first_row * groups.num_quads;
    const int64_t first_entry = first_row * groups.count;
    const int32_t* starts = product.rows.starts + first_entry;
    const float* scales = product.rows.scales + first_entry;
    const float* middles = product.rows.middles + first_entry;
    Vec totals[ROWS][kVectors];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) totals[row][v] = Vec{};
    }
    const auto vector_at = [&](int v) __attribute__((always_inline)) {
        return step + v / 2 * panel_bytes + v % 2 * (kStepBytes / 2);
    };
    int64_t num_done = 0;
    const auto advance = [&]() __attribute__((always_inline)) {
        if constexpr (PANELS == 1) {
            // Few tiles are done with a panel before the next one has come, and in the nearest
            // cache that would take the panel's own place.
            if (few_tiles) {
                next.fetch<kLinesPerStep, 2>(num_done++);
            } else {
                next.fetch<kLinesPerStep>(num_done++);
            }
        } else {
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                __builtin_prefetch(vector_at(v) + kPrefetchSteps * kStepBytes);
            }
        }
        step += kStepBytes;
    };
    for (int64_t group = 0; group < groups.count; ++group) {
        IntVec sums[ROWS][kVectors];
        CBATCH_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) sums[row][v] = IntVec{} + starts[row];
        }
        const int num_quads = groups.quads_of(group);
        for (int k = 0; k < num_quads; ++k) {
            WeightQuads weights[kVectors];
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) weights[v] = load_quads(vector_at(v));
            advance();
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                CBATCH_UNROLL
                for (int v = 0; v < kVectors; ++v) {
                    sums[row][v] = add_products(sums[row][v], weights[v], quads[row]);
                }
            }
            quads += ROWS;
        }
        Vec column_scales[kVectors];
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            column_scales[v] = load(reinterpret_cast<const float*>(vector_at(v)));
        }
        advance();
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const Vec column_sum = load(reinterpret_cast<const float*>(vector_at(v)));
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                const Vec sum = __builtin_convertvector(sums[row][v], Vec);
                totals[row][v] += sum * scales[row] * column_scales[v];
                totals[row][v] += column_sum * middles[row];
            }
        }
        advance();
        starts += ROWS;
        scales += ROWS;
        middles += ROWS;
    }
    const int64_t column = first_panel * kPanel, left = product.num_columns - column;
    const float* bias = product.bias == nullptr ? nullptr : product.bias + column;
    float* output = product.output + first_row * product.output_stride + column;
    if (left >= kColumns) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const Vec offset = bias == nullptr ? Vec{} : load(bias + v * kWidth);
            CBATCH_UNROLL
            for (int row = 0; row < ROWS; ++row) {
                store(output + row * product.output_stride + v * kWidth, totals[row][v] + offset);
            }
        }
        return;
    }
    float tile[ROWS][kColumns];
    CBATCH_UNROLL
    for (int row = 0; row < ROWS; ++row) {
        CBATCH_UNROLL
        for (int v = 0; v < kVectors; ++v) store(&tile[row][v * kWidth], totals[row][v]);
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int64_t i = 0; i < left; ++i) {
            output[row * product.output_stride + i] =
                tile[row][i] + (bias == nullptr ? 0.0f : bias[i]);
        }
    }
}

template <int ROWS>
void multiply_tile(int num_rows, const GroupedProduct& product, int64_t first_row, int64_t panel,
                   NextWeights next, bool few_tiles) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1>(product, first_row, panel, next, few_tiles);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1>(num_rows, product, first_row, panel, next, few_tiles);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`.
void multiply_panel(const GroupedProduct& product, const RowTiles& tiles, int64_t first_tile,
                    int64_t end_tile, int64_t panel, int64_t panels_ahead) {
    const int64_t num_steps = product.groups.num_steps(), num_tiles = end_tile - first_tile;
    // A single tile reads its panel once: what it needs next is a little further on.
    const int64_t steps_ahead = num_tiles == 1 ? kPrefetchSteps : panels_ahead * num_steps;
    const uint8_t* ahead = product.panels + (panel * num_steps + steps_ahead) * kStepBytes;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        multiply_tile<kMaxGroupedRows>(
            tiles.size(tile), product, tiles.start(tile), panel,
            NextWeights(ahead, kStepBytes, num_steps, tile - first_tile, num_tiles),
            num_tiles <= kFewTiles);
    }
}

constexpr int kPanelsAtOnce = 4;

}  // namespace

// `packed` holds ceil(num_columns / kPanel) panels of kPanel * (ceil(depth / 4) * 4 +
// ceil(depth / kGroup) * 8) bytes.
CBATCH_EXPORT(pack_int8_groups)(const float* weight, int64_t num_columns, int64_t depth,
                                uint8_t* packed, int64_t num_threads) {
    const Groups groups(depth);
    const int64_t num_panels = ceil_div(num_columns, kPanel);
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads))
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        uint8_t* to = packed + panel * groups.panel_bytes();
        std::memset(to, 0, static_cast<size_t>(groups.panel_bytes()));
        for (int column = 0; column < kPanel && panel * kPanel + column < num_columns; ++column) {
            const float* from = weight + (panel * kPanel + column) * depth;
            for (int64_t group = 0; group < groups.count; ++group) {
                const int64_t steps = group * (kQuadsPerGroup + kStepsOfScales);
                pack_group(from + group * kGroup, groups.depths_of(group), groups.quads_of(group),
                           column, to + steps * kStepBytes);
            }
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
    const GroupedProduct product{packed, bias, rows, groups, output, num_columns, output_stride};
    const RowTiles tiles(num_rows, kMaxGroupedRows);
    const bool one_row = num_rows == 1;
    const WorkSplit work(num_panels, one_row ? kPanelsAtOnce : 1, tiles.count, num_threads);
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
            if (one_row && panel + kPanelsAtOnce <= num_panels) {
                multiply<1, kPanelsAtOnce>(product, 0, panel, NextWeights(nullptr, 0, 1, 0, 1), true);
                continue;
            }
            const int64_t wanted = panel + work.panels_per_item;
            const int64_t end = wanted < num_panels ? wanted : num_panels;
            for (; panel < end; ++panel) {
                multiply_panel(product, tiles, work.first_tile(item), work.end_tile(item), panel,
                               num_threads);
            }
        }
    }
}
