// Paged attention of packed decodes and chunks, and the store of their keys and values.

#include <algorithm>

#include "attention_tile.h"
#include "scratch.h"

namespace {

struct WorkItem {
    Tile tile;
    int64_t partial;  // where its split's sum goes, -1: the item covers its whole tile
    int64_t num_partials;  // of the tile; set in the tile's first item
    int64_t cost;
};

int64_t first_row_of(const CbatchAttention& args, int64_t sequence) {
    const int64_t group = args.num_heads / args.num_kv_heads;
    return args.first_queries == nullptr ? 0 : args.first_queries[sequence] * group;
}

int64_t tiles_of(const CbatchAttention& args, int64_t sequence) {
    const int64_t group = args.num_heads / args.num_kv_heads;
    const int64_t rows =
        (args.query_start_loc[sequence + 1] - args.query_start_loc[sequence]) * group -
        first_row_of(args, sequence);
    return (rows + kTileRows - 1) / kTileRows;
}

Tile make_tile(const CbatchAttention& args, int64_t sequence, int64_t kv_head, int64_t first_row) {
    const int64_t group = args.num_heads / args.num_kv_heads;
    const int64_t query_len =
        args.query_start_loc[sequence + 1] - args.query_start_loc[sequence];
    const int64_t cached = args.seq_lens[sequence] - query_len;
    const int64_t rows_left = query_len * group - first_row;
    const int num_rows = static_cast<int>(rows_left < kTileRows ? rows_left : kTileRows);
    const int64_t first_position = cached + first_row / group;
    const int64_t last_position = cached + (first_row + num_rows - 1) / group;
    int64_t first_key = 0;
    if (args.window > 0 && first_position >= args.window) {
        first_key = first_position - args.window + 1;
    }
    return Tile{sequence, kv_head, first_row, num_rows, first_key, last_position};
}

template <class Element>
class Attention {
  public:
    explicit Attention(const CbatchAttention& args) : args_(args) {}

    void run() {
        int64_t num_tiles = 0, num_splits = 0;
        for (int64_t s = 0; s < args_.num_seqs; ++s) {
            const int64_t tiles = tiles_of(args_, s) * args_.num_kv_heads;
            num_tiles += tiles;
            num_splits += tiles * ((args_.seq_lens[s] - 1) / kSplitKeys + 1);
        }
        // Splitting does not change a result: it pays where tiles do not keep all threads busy.
        const bool splits_tiles = num_tiles < 8 * args_.num_threads;
        const int64_t max_items = splits_tiles ? num_splits : num_tiles;
        const Scratch item_memory(static_cast<size_t>(max_items) * sizeof(WorkItem));
        items_ = item_memory.as<WorkItem>();
        plan(splits_tiles);

        const size_t partial_size = kTileRows * (args_.value_head_dim + 2);
        const Scratch partial_memory(num_partials_ * partial_size * sizeof(float));
        partials_ = partial_memory.as<float>();
        const size_t query_size = (kTileRows * args_.head_dim + 15) / 16 * 16;
        const size_t thread_size = query_size + (2 * partial_size + 15) / 16 * 16;
        const Scratch thread_memory(args_.num_threads * thread_size * sizeof(float));
        float* scratch = thread_memory.as<float>();
        int next_thread = 0;

#pragma omp parallel num_threads(static_cast<int>(args_.num_threads))
        {
            int thread;
#pragma omp atomic capture
            thread = next_thread++;
            float* query = scratch + thread * thread_size;
            float* sums = query + query_size;
#pragma omp for schedule(static)
            for (int64_t token = 0; token < args_.num_tokens; ++token) store_token(token);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < num_items_; ++i) attend(items_[in_turn(i)], query, sums);
            if (num_partials_ > 0) {
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < num_items_; ++i) merge(items_[i], sums);
            }
        }
    }

  private:
    void plan(bool splits_tiles) {
        for (int64_t s = 0; s < args_.num_seqs; ++s) {
            const int64_t tiles = tiles_of(args_, s), first_row = first_row_of(args_, s);
            for (int64_t head = 0; head < args_.num_kv_heads; ++head) {
                for (int64_t t = 0; t < tiles; ++t) {
                    add_items(make_tile(args_, s, head, first_row + t * kTileRows), splits_tiles);
                }
            }
        }
        std::sort(items_, items_ + num_items_,
                  [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
    }

    // The most costly item left and the cheapest left in turn: chunks compute while decodes wait for
    // memory, so that threads which do one of each take less time than two of a kind.
    int64_t in_turn(int64_t i) const {
        return i % 2 == 0 ? i / 2 : num_items_ - 1 - i / 2;
    }

    void add_items(const Tile& tile, bool splits_tiles) {
        const int64_t num_splits =
            tile.last_key / kSplitKeys - tile.first_key / kSplitKeys + 1;
        if (!splits_tiles || num_splits == 1) {
            const int64_t cost = (tile.last_key - tile.first_key + 1) * tile.num_rows;
            items_[num_items_++] = WorkItem{tile, -1, 0, cost};
            return;
        }
        for (int64_t split = 0; split < num_splits; ++split) {
            Tile part = tile;
            const int64_t start = (tile.first_key / kSplitKeys + split) * kSplitKeys;
            part.first_key = std::max<int64_t>(start, tile.first_key);
            part.last_key = std::min<int64_t>(start + kSplitKeys - 1, tile.last_key);
            items_[num_items_++] =
                WorkItem{part, num_partials_++, split == 0 ? num_splits : 0,
                         (part.last_key - part.first_key + 1) * part.num_rows};
        }
    }

    void store_token(int64_t token) const {
        const int64_t slot = args_.key == nullptr ? -1 : args_.slot_mapping[token];
        if (slot < 0) return;
        const int64_t block = slot / args_.block_size, offset = slot % args_.block_size;
        for (int64_t head = 0; head < args_.num_kv_heads; ++head) {
            copy_row(args_.key + token * args_.key_token_stride + head * args_.key_head_stride,
                     static_cast<Element*>(args_.k_cache) + block * args_.k_block_stride +
                         offset * args_.k_slot_stride + head * args_.k_head_stride,
                     args_.head_dim);
            copy_row(
                args_.value + token * args_.value_token_stride + head * args_.value_head_stride,
                static_cast<Element*>(args_.v_cache) + block * args_.v_block_stride +
                    offset * args_.v_slot_stride + head * args_.v_head_stride,
                args_.value_head_dim);
        }
    }

    static void copy_row(const float* from, Element* to, int64_t size) {
        for (int64_t i = 0; i < size; ++i) convert(from[i], to + i);
    }

    Partial partial_at(float* memory) const {
        return Partial{memory + kTileRows * args_.value_head_dim,
                       memory + kTileRows * (args_.value_head_dim + 1), memory};
    }

    Partial stored_partial(int64_t index) const {
        return partial_at(partials_ + index * kTileRows * (args_.value_head_dim + 2));
    }

    // The rows' scaled queries, one after another, and the keys that each sees.
    Mask prepare(const Tile& tile, float* query) const {
        const int64_t group = args_.num_heads / args_.num_kv_heads;
        const int64_t start = args_.query_start_loc[tile.sequence];
        const int64_t query_len = args_.query_start_loc[tile.sequence + 1] - start;
        Mask mask;
        for (int row = 0; row < tile.num_rows; ++row) {
            const int64_t index = (tile.first_row + row) / group;
            const int64_t head = tile.kv_head * group + (tile.first_row + row) % group;
            const int64_t position = args_.seq_lens[tile.sequence] - query_len + index;
            mask.last[row] = position;
            mask.first[row] = args_.window > 0 ? position - args_.window + 1 : 0;
            const float* from = args_.query + (start + index) * args_.query_token_stride +
                                head * args_.query_head_stride;
            for (int64_t i = 0; i < args_.head_dim; ++i) {
                query[row * args_.head_dim + i] = from[i] * args_.scale;
            }
        }
        return mask;
    }

    void attend(const WorkItem& item, float* query, float* sums) const {
        const Tile& tile = item.tile;
        const Mask mask = prepare(tile, query);
        if (item.partial >= 0) {
            attend_split<Element>(args_, tile, mask, query, tile.first_key, tile.last_key,
                                  stored_partial(item.partial));
            return;
        }
        const Partial total = partial_at(sums);
        const Partial part = partial_at(sums + kTileRows * (args_.value_head_dim + 2));
        clear(total, tile.num_rows, args_.value_head_dim);
        for (int64_t start = tile.first_key; start <= tile.last_key;) {
            const int64_t split_end = (start / kSplitKeys + 1) * kSplitKeys - 1;
            const int64_t end = split_end < tile.last_key ? split_end : tile.last_key;
            attend_split<Element>(args_, tile, mask, query, start, end, part);
            fold(total, part, tile.num_rows, args_.value_head_dim);
            start = end + 1;
        }
        finish(tile, total);
    }

    void merge(const WorkItem& item, float* sums) const {
        if (item.num_partials == 0) return;
        const Partial total = partial_at(sums);
        clear(total, item.tile.num_rows, args_.value_head_dim);
        for (int64_t split = 0; split < item.num_partials; ++split) {
            fold(total, stored_partial(item.partial + split), item.tile.num_rows,
                 args_.value_head_dim);
        }
        finish(item.tile, total);
    }

    void finish(const Tile& tile, const Partial& total) const {
        const int64_t group = args_.num_heads / args_.num_kv_heads;
        const int64_t start = args_.query_start_loc[tile.sequence];
        for (int row = 0; row < tile.num_rows; ++row) {
            const int64_t token = start + (tile.first_row + row) / group;
            const int64_t head = tile.kv_head * group + (tile.first_row + row) % group;
            float factor = 1.0f, sum = total.sum[row];
            if (args_.sinks != nullptr) {
                const float sink = args_.sinks[head], highest = total.maximum[row];
                const float maximum = sink > highest ? sink : highest;
                factor = exponential(highest - maximum);
                sum = sum * factor + exponential(sink - maximum);
            }
            factor /= sum;
            float* to = args_.output + (token * args_.num_heads + head) * args_.value_head_dim;
            const float* from = total.values + row * args_.value_head_dim;
            for (int64_t i = 0; i < args_.value_head_dim; ++i) to[i] = from[i] * factor;
        }
    }

    const CbatchAttention& args_;
    WorkItem* items_ = nullptr;
    float* partials_ = nullptr;
    int64_t num_items_ = 0, num_partials_ = 0;
};

}  // namespace

CBATCH_EXPORT(attention)(const CbatchAttention* args) {
    if (args->cache_is_bfloat16 != 0) {
        Attention<BFloat16>(*args).run();
    } else {
        Attention<float>(*args).run();
    }
}
