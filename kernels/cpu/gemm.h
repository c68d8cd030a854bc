// Panels of packed weights and tiles of rows: what all products share.
#pragma once

#include "vector.h"

namespace {

// A panel holds kPanel output columns, so that one step of depth is two vectors.
constexpr int kPanel = 2 * kWidth;
// Rows per tile: accumulators fill the registers, with room for a panel's two vectors.
constexpr int kMaxRows = kWidth == 16 ? 12 : (kWidth == 8 ? 6 : 4);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cuts rows into tiles of nearly equal size, none above a maximum: 13 rows are 7 and 6, since a
// tile of a single row would cost nearly as much as a full one.
struct RowTiles {
    int64_t count, small_size, num_large;

    explicit RowTiles(int64_t num_rows, int64_t max_rows = kMaxRows)
        : count(ceil_div(num_rows, max_rows)),
          small_size(count > 0 ? num_rows / count : 0),
          num_large(count > 0 ? num_rows % count : 0) {}
    int64_t start(int64_t tile) const {
        return tile * small_size + (tile < num_large ? tile : num_large);
    }
    int size(int64_t tile) const {
        return static_cast<int>(small_size + (tile < num_large ? 1 : 0));
    }
};

// Up to so many tiles are done with a panel before the next one has come: memory is what is waited
// for, and the second cache can have more lines on their way than the first, where they would take
// the panel's own place. With more tiles computing is, for which weights lie better in the first.
constexpr int64_t kFewTiles = 2;

// The weights that a thread will need next, fetched while it multiplies: where a panel meets several
// tiles of rows it is read from a near cache, and memory would rest meanwhile.
struct NextWeights {
    const char* start;
    int64_t bytes_per_step;

    // The share of a tile, one of `num_tiles`, in what `num_steps` steps of depth read.
    NextWeights(const void* weights, int64_t bytes_per_step_of_panel, int64_t num_steps,
                int64_t tile, int64_t num_tiles)
        : start(static_cast<const char*>(weights) +
                bytes_per_step_of_panel * num_steps * tile / num_tiles),
          bytes_per_step(ceil_div(bytes_per_step_of_panel, num_tiles)) {}

    // Into the nearest cache, or with LOCALITY 2 into the next one.
    template <int LINES, int LOCALITY = 3>
    CBATCH_INLINE void fetch(int64_t step) const {
        CBATCH_UNROLL
        for (int line = 0; line < LINES; ++line) {
            const char* address = start + step * bytes_per_step + line * bytes_per_step / LINES;
            __builtin_prefetch(address, 0, LOCALITY);
        }
    }
};

// Panels that one item takes at once where rows are few, which hides the latency of the additions.
constexpr int kPanelsAtOnce = 4;

// Work items: a few panels each, and parts of the row tiles where panels alone are too few.
struct WorkSplit {
    int64_t num_panels, panels_per_item, num_panel_items, num_row_items, num_tiles;

    WorkSplit(int64_t num_panels_of_weight, bool few_rows, int64_t num_row_tiles,
              int64_t num_threads)
        : num_panels(num_panels_of_weight),
          panels_per_item(few_rows ? kPanelsAtOnce : 1),
          num_panel_items(ceil_div(num_panels, panels_per_item)),
          num_row_items(ceil_div(8 * num_threads, num_panel_items)),
          num_tiles(num_row_tiles) {
        if (num_row_items > num_tiles) num_row_items = num_tiles;
    }
    int64_t count() const { return num_panel_items * num_row_items; }
    int64_t first_panel(int64_t item) const { return item / num_row_items * panels_per_item; }
    int64_t end_panel(int64_t item) const {
        const int64_t end = first_panel(item) + panels_per_item;
        return end < num_panels ? end : num_panels;
    }
    // Whether few rows meet as many panels as are taken at once.
    bool is_several(int64_t item) const {
        return end_panel(item) - first_panel(item) == kPanelsAtOnce;
    }
    int64_t first_tile(int64_t item) const {
        return item % num_row_items * num_tiles / num_row_items;
    }
    int64_t end_tile(int64_t item) const {
        return (item % num_row_items + 1) * num_tiles / num_row_items;
    }
};

}  // namespace
