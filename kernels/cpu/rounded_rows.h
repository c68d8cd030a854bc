// Rows of activations rounded for an 8-bit product, in tiles and each alone: many rows are multiplied
// by all columns, then single ones by few.
#pragma once

#include "int8_groups_product.h"
#include "int8_product.h"
#include "int8_rounding.h"
#include "scratch.h"

namespace {

struct InputRows {
    const float* values;  // [count, depth] at `stride`
    int64_t stride, count, depth;
};

// Rows of int16, in tiles and one by one.
class Int8Rows {
  public:
    static constexpr int kRowsPerTile = kMaxRows;

    Int8Rows(const InputRows& input, const int8_t* packed, const float* scales,
             int64_t num_columns, int64_t group)
        : input_(input),
          num_pairs_(ceil_div(input.depth, 2)),
          tile_memory_(row_bytes()),
          row_memory_(row_bytes()),
          scale_memory_(static_cast<size_t>(input.count) * sizeof(float)),
          product_{packed,     scales,      scale_memory_.as<float>(),
                   num_pairs_, num_columns, group / 2} {}

    void round(const RowTiles& tiles, int64_t tile) const {
        quantize_tile(input_.values, input_.stride, input_.depth, tiles, tile,
                      tile_memory_.as<int16_t>(), scale_memory_.as<float>());
        const int64_t end = tiles.start(tile) + tiles.size(tile);
        for (int64_t row = tiles.start(tile); row < end; ++row) {
            quantize_row(input_.values + row * input_.stride, input_.depth, 1, alone(row));
        }
    }
    bool is_finite(int64_t row) const {
        return product_.row_scales[row] == product_.row_scales[row];
    }
    template <class FinishOf>
    void multiply_tiles(const RowTiles& tiles, int64_t panel, int64_t panels_ahead,
                        const FinishOf& finish_of) const {
        multiply_panel(product_, tile_memory_.as<int16_t>(), tiles, 0, tiles.count, panel,
                       panels_ahead, finish_of);
    }
    template <class Finish>
    void multiply_row(int64_t row, int64_t panel, const Finish& finish) const {
        multiply<1, 1>(product_, alone(row), row, panel, NextWeights(nullptr, 0, 1, 0, 1), finish);
    }

  private:
    size_t row_bytes() const {
        return static_cast<size_t>(input_.count * num_pairs_) * sizeof(int32_t);
    }
    int16_t* alone(int64_t row) const { return row_memory_.as<int16_t>() + row * 2 * num_pairs_; }

    InputRows input_;
    int64_t num_pairs_;
    Scratch tile_memory_, row_memory_, scale_memory_;
    Int8Product product_;
};

// Memory for rows rounded by groups.
class RoundedMemory {
  public:
    RoundedMemory(int64_t num_rows, const Groups& groups)
        : quads_(static_cast<size_t>(num_rows * groups.num_quads) * sizeof(RowQuad)),
          starts_(static_cast<size_t>(num_rows * groups.count) * sizeof(int32_t)),
          scales_(static_cast<size_t>(num_rows * groups.count) * sizeof(float)),
          middles_(static_cast<size_t>(num_rows * groups.count) * sizeof(float)) {}
    RoundedRows rows() const {
        return {quads_.as<RowQuad>(), starts_.as<int32_t>(), scales_.as<float>(),
                middles_.as<float>()};
    }

  private:
    Scratch quads_, starts_, scales_, middles_;
};

// Rows of int8 by groups, in tiles and one by one.
class GroupedRows {
  public:
    static constexpr int kRowsPerTile = kMaxGroupedRows;

    GroupedRows(const InputRows& input, const uint8_t* packed)
        : input_(input),
          groups_(input.depth),
          tile_memory_(input.count, groups_),
          row_memory_(input.count, groups_),
          change_memory_(static_cast<size_t>(input.count) * sizeof(RowChanges)),
          tiles_product_{packed, tile_memory_.rows(), groups_},
          rows_product_{packed, row_memory_.rows(), groups_} {}

    void round(const RowTiles& tiles, int64_t tile) const {
        const int64_t first = tiles.start(tile), end = first + tiles.size(tile);
        RowChanges* changes = change_memory_.as<RowChanges>();
        for (int64_t row = first; row < end; ++row) changes[row] = RowChanges();
        for (int64_t group = 0; group < groups_.count; ++group) {
            round_rows(input_.values, input_.stride, first, tiles.size(tile), groups_, group,
                       tiles_product_.rows, changes + first);
            for (int64_t row = first; row < end; ++row) {
                round_rows(input_.values, input_.stride, row, 1, groups_, group,
                           rows_product_.rows);
            }
        }
    }
    // What rounding did to a row.
    const RowChanges& changes(int64_t row) const { return change_memory_.as<RowChanges>()[row]; }
    bool is_finite(int64_t row) const {
        for (int64_t group = 0; group < groups_.count; ++group) {
            const float scale = rows_product_.rows.scales[row * groups_.count + group];
            if (scale != scale) return false;
        }
        return true;
    }
    template <class FinishOf>
    void multiply_tiles(const RowTiles& tiles, int64_t panel, int64_t panels_ahead,
                        const FinishOf& finish_of) const {
        multiply_panel(tiles_product_, tiles, 0, tiles.count, panel, panels_ahead, finish_of);
    }
    template <class Finish>
    void multiply_row(int64_t row, int64_t panel, const Finish& finish) const {
        multiply<1, 1>(rows_product_, row, panel, NextWeights(nullptr, 0, 1, 0, 1), false, finish);
    }

  private:
    InputRows input_;
    Groups groups_;
    RoundedMemory tile_memory_, row_memory_;
    Scratch change_memory_;
    GroupedProduct tiles_product_, rows_product_;
};

}  // namespace
