// The product of rounded rows and packed weights of int8_groups.h: what every use of it shares.
#pragma once

#include "int8_groups.h"

namespace {

constexpr int kLinesPerStep = kStepBytes > 64 ? kStepBytes / 64 : 1;
// How far ahead weights of panels that are multiplied at once are fetched, in steps.
constexpr int kStepsAhead = 16;

struct GroupedProduct {
    const uint8_t* panels;
    RoundedRows rows;
    Groups groups;
};

// A row's outputs need no scale any more.
constexpr float kOnes[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
static_assert(sizeof(kOnes) / sizeof(float) >= kMaxGroupedRows, "one for each row of a tile");

// `finish` gets [ROWS][2 * PANELS] vectors of outputs, without a bias, and scales of rows.
template <int ROWS, int PANELS, class Finish>
CBATCH_INLINE void multiply(const GroupedProduct& product, int64_t first_row, int64_t first_panel,
                            NextWeights next, bool few_tiles, const Finish& finish) {
    constexpr int kVectors = 2 * PANELS;
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
            if (few_tiles) {
                next.fetch<kLinesPerStep, 2>(num_done++);
            } else {
                next.fetch<kLinesPerStep>(num_done++);
            }
        } else {
            CBATCH_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                __builtin_prefetch(vector_at(v) + kStepsAhead * kStepBytes);
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
    finish(totals, kOnes);
}

template <int ROWS, class Finish>
void multiply_tile(int num_rows, const GroupedProduct& product, int64_t first_row, int64_t panel,
                   NextWeights next, bool few_tiles, const Finish& finish) {
    if (num_rows == ROWS) {
        multiply<ROWS, 1>(product, first_row, panel, next, few_tiles, finish);
    } else if constexpr (ROWS > 1) {
        multiply_tile<ROWS - 1>(num_rows, product, first_row, panel, next, few_tiles, finish);
    }
}

// One panel by the tiles from `first_tile` to before `end_tile`; `finish_of` gives, for the first
// row of a tile, what its outputs are for.
template <class FinishOf>
void multiply_panel(const GroupedProduct& product, const RowTiles& tiles, int64_t first_tile,
                    int64_t end_tile, int64_t panel, int64_t panels_ahead,
                    const FinishOf& finish_of) {
    const int64_t num_steps = product.groups.num_steps(), num_tiles = end_tile - first_tile;
    const uint8_t* ahead = product.panels + (panel + panels_ahead) * num_steps * kStepBytes;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
        multiply_tile<kMaxGroupedRows>(
            tiles.size(tile), product, tiles.start(tile), panel,
            NextWeights(ahead, kStepBytes, num_steps, tile - first_tile, num_tiles),
            num_tiles <= kFewTiles, finish_of(tiles.start(tile)));
    }
}

}  // namespace
