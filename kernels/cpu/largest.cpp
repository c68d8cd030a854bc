// The largest output of each row of a product with a vocabulary, without writing all of them.
//
// Every output of the 8-bit product is bounded where it is computed, and of a panel of columns only
// the largest upper bound is kept. A panel whose bound is below another one's lower bound cannot
// hold the largest output; the others are computed again, in float32 where weights for it are given
// (as gemm.cpp computes them, to the same bits): first the panel of the highest bound, and what
// cannot reach its outputs is left out too. kernels/cpu_head.py proves the bounds.

#include "scratch.h"
#include "vocabulary.h"

namespace {

constexpr int64_t kPanelsPerItem = 64;  // that one thread searches at a time
constexpr int kChains = 8;              // columns computed at once, to hide the latency of sums
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Best {
    float value;
    int64_t column;

    // Of equal values the first column; what is not a number stays.
    void take(float other, int64_t other_column) {
        if (value != value) return;
        if (other > value || (other == value && other_column < column) || other != other) {
            value = other;
            column = other != other ? 0 : other_column;
        }
    }
};

void compute_exactly(const float* weight, int64_t depth, const float* row, const int64_t* columns,
                     int count, float* outputs) {
    const float* from[kChains];
    for (int c = 0; c < kChains; ++c) from[c] = weight + columns[c < count ? c : 0] * depth;
    float sums[kChains] = {};
    for (int64_t k = 0; k < depth; ++k) {
        CBATCH_UNROLL
        for (int c = 0; c < kChains; ++c) sums[c] = multiply_add(row[k], from[c][k], sums[c]);
    }
    for (int c = 0; c < count; ++c) outputs[c] = sums[c];
}

// Takes the outputs of a panel that can be the largest; returns how many were computed exactly.
template <bool IS_EXACT, class Rows>
int64_t take_panel(const Vocabulary& vocabulary, const Rows& rows, int64_t row, int64_t panel,
                   float lowest, Best* best) {
    float values[kPanel];
    rows.multiply_row(row, panel, KeepOutputs{vocabulary, panel, values});
    const int64_t first = panel * kPanel, left = vocabulary.num_columns - first;
    const int64_t size = left < kPanel ? left : kPanel;
    if constexpr (!IS_EXACT) {
        for (int64_t i = 0; i < size; ++i) best->take(values[i], first + i);
        return 0;
    }
    const float distance = vocabulary.distance(panel, row);
    int64_t kept[kPanel];
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {
        if (!(values[i] + distance < lowest)) kept[count++] = first + i;
    }
    const InputRows& input = vocabulary.input;
    for (int64_t done = 0; done < count; done += kChains) {
        const int64_t rest = count - done;
        const int group = static_cast<int>(rest < kChains ? rest : kChains);
        float outputs[kChains];
        compute_exactly(vocabulary.weight, input.depth, input.values + row * input.stride,
                        kept + done, group, outputs);
        for (int c = 0; c < group; ++c) best->take(outputs[c], kept[done + c]);
    }
    return count;
}

// The largest outputs of the float32 product, or of the 8-bit product of `rows`.
template <bool IS_EXACT, class Rows>
void find_largest(Vocabulary vocabulary, const Rows& rows, int64_t num_threads) {
    const int64_t num_rows = vocabulary.input.count, num_panels = vocabulary.num_panels();
    const int64_t row_stride = ceil_div(num_rows, kWidth) * kWidth;
    const Scratch upper_memory(static_cast<size_t>(num_panels * row_stride) * sizeof(float));
    const Scratch lowest_memory(static_cast<size_t>(row_stride) * sizeof(float));
    const Scratch bound_memory(static_cast<size_t>(num_rows) * sizeof(RowBound));
    const Scratch peak_memory(static_cast<size_t>(num_rows) * sizeof(Peak));
    vocabulary.row_bounds = bound_memory.as<RowBound>();
    Peak* peaks = peak_memory.as<Peak>();
    float* upper = upper_memory.as<float>();
    float* lowest = lowest_memory.as<float>();
    const RowTiles tiles(num_rows, Rows::kRowsPerTile);
    for (int64_t row = 0; row < row_stride; ++row) lowest[row] = row < num_rows ? -kInfinity : kNaN;
    for (int64_t row = 0; row < num_rows; ++row) {
        vocabulary.best[row] = -kInfinity;
        vocabulary.best_columns[row] = vocabulary.num_exact[row] = 0;
        peaks[row] = Peak{-kInfinity, -1};
    }
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        const Scratch own_lowest_memory(static_cast<size_t>(num_rows) * sizeof(float));
        const Scratch best_memory(static_cast<size_t>(num_rows) * sizeof(Best));
        const Scratch count_memory(static_cast<size_t>(num_rows) * sizeof(int64_t));
        const Scratch own_peak_memory(static_cast<size_t>(num_rows) * sizeof(Peak));
        Peak* own_peaks = own_peak_memory.as<Peak>();
        float* own_lowest = own_lowest_memory.as<float>();
        Best* own_best = best_memory.as<Best>();
        int64_t* own_count = count_memory.as<int64_t>();
        for (int64_t row = 0; row < num_rows; ++row) {
            own_best[row] = Best{-kInfinity, vocabulary.num_columns};
            own_count[row] = 0;
            own_lowest[row] = -kInfinity;
            own_peaks[row] = Peak{-kInfinity, -1};
        }
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            rows.round(tiles, tile);
            if constexpr (IS_EXACT) {
                const int64_t first = tiles.start(tile);
                for (int64_t row = first; row < first + tiles.size(tile); ++row) {
                    vocabulary.row_bounds[row] =
                        bound_row(rows.changes(row), vocabulary.largest_norm);
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            float* to = upper + panel * row_stride;
            rows.multiply_tiles(tiles, panel, num_threads, [&](int64_t first) {
                return KeepBounds<IS_EXACT>{vocabulary, first, panel, to, own_lowest, own_peaks};
            });
        }
#pragma omp critical
        for (int64_t row = 0; row < num_rows; ++row) {
            lowest[row] = own_lowest[row] > lowest[row] ? own_lowest[row] : lowest[row];
            const Peak& own = own_peaks[row];
            if (own.panel >= 0) peaks[row].take(own.bound, own.panel);
        }
#pragma omp barrier
        // What is most likely the largest is computed first: the rest has to reach it.
        if constexpr (IS_EXACT) {
#pragma omp for schedule(dynamic)
            for (int64_t row = 0; row < num_rows; ++row) {
                if (peaks[row].panel < 0 || !rows.is_finite(row)) continue;
                Best* best = own_best + row;
                own_count[row] += take_panel<IS_EXACT>(vocabulary, rows, row, peaks[row].panel,
                                                       lowest[row], best);
                lowest[row] = best->value > lowest[row] ? best->value : lowest[row];
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < ceil_div(num_panels, kPanelsPerItem); ++item) {
            const int64_t wanted = (item + 1) * kPanelsPerItem;
            const int64_t end = wanted < num_panels ? wanted : num_panels;
            for (int64_t panel = item * kPanelsPerItem; panel < end; ++panel) {
                const float* of_panel = upper + panel * row_stride;
                for (int64_t first = 0; first < num_rows; first += kWidth) {
                    if (!any_lane(load(of_panel + first) >= load(lowest + first))) continue;
                    const int64_t last = first + kWidth < num_rows ? first + kWidth : num_rows;
                    for (int64_t row = first; row < last; ++row) {
                        // A row that is not finite has no largest output to look for.
                        if (!(of_panel[row] >= lowest[row]) || !rows.is_finite(row)) continue;
                        if (panel == peaks[row].panel) continue;
                        own_count[row] += take_panel<IS_EXACT>(vocabulary, rows, row, panel,
                                                               lowest[row], own_best + row);
                    }
                }
            }
        }
#pragma omp critical
        for (int64_t row = 0; row < num_rows; ++row) {
            Best merged{vocabulary.best[row], vocabulary.best_columns[row]};
            if (own_best[row].column < vocabulary.num_columns) {
                merged.take(own_best[row].value, own_best[row].column);
            }
            vocabulary.best[row] = rows.is_finite(row) ? merged.value : kNaN;
            vocabulary.best_columns[row] = merged.column;
            vocabulary.num_exact[row] += own_count[row];
        }
    }
}

}  // namespace

// `best` and `best_columns` are [num_rows]; of equal outputs the first is best, and a row with one
// that is not a number has such a best. `bias` is padded to whole panels with -inf.
CBATCH_EXPORT(largest_int8)(const float* input, int64_t input_stride, int64_t num_rows,
                            int64_t depth, const int8_t* packed, const float* scales,
                            const float* bias, int64_t num_columns, int64_t group, float* best,
                            int64_t* best_columns, int64_t* num_exact, int64_t num_threads) {
    const InputRows rows{input, input_stride, num_rows, depth};
    const Vocabulary vocabulary{rows, num_columns, bias, best, best_columns, num_exact};
    find_largest<false>(vocabulary, Int8Rows(rows, packed, scales, num_columns, group),
                        num_threads);
}

// The same of the product of 8-bit activations; or with `weight` [num_columns, depth] of the float32
// product, which has no bias, and `num_exact` gets how many outputs of each row were computed so.
// The errors and norms are the largest of each panel's columns.
CBATCH_EXPORT(largest_int8_groups)(const float* input, int64_t input_stride, int64_t num_rows,
                                   int64_t depth, const uint8_t* packed, const float* bias,
                                   int64_t num_columns, const float* weight,
                                   const float* panel_errors, const float* panel_norms,
                                   float largest_norm, float* best, int64_t* best_columns,
                                   int64_t* num_exact, int64_t num_threads) {
    const InputRows rows{input, input_stride, num_rows, depth};
    const Vocabulary vocabulary{rows,         num_columns, bias,   best,
                                best_columns, num_exact,   weight, panel_errors,
                                panel_norms, largest_norm, nullptr};
    const GroupedRows rounded(rows, packed);
    if (weight == nullptr) {
        find_largest<false>(vocabulary, rounded, num_threads);
    } else {
        find_largest<true>(vocabulary, rounded, num_threads);
    }
}
