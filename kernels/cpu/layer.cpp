// A decoder layer in one call: the steps are the other kernels, one after another.
//
// Keys and values of all tokens are stored. Whatever follows looks at one token at a time, so it is
// left out for tokens that do not come out.

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "layer.h"
#include "scratch.h"
#include "vector.h"

#define CBATCH_IMPORT(name) extern "C" void CBATCH_JOIN(cbatch_##name, CBATCH_VARIANT)
#define CBATCH_CALL(name) CBATCH_JOIN(cbatch_##name, CBATCH_VARIANT)

CBATCH_IMPORT(add_norm)(const float*, const float*, float, float*, const float*, float, float*,
                        int64_t, int64_t, int64_t);
CBATCH_IMPORT(norm_rope)(float*, int64_t, int64_t, int64_t, int64_t, int64_t, const float*,
                         const float*, float, const float*, const float*, int64_t, int64_t);
CBATCH_IMPORT(activate_and_multiply)(const float*, float*, int64_t, int64_t, int64_t, int64_t);
CBATCH_IMPORT(attention)(const CbatchAttention*);
CBATCH_IMPORT(linear)(const float*, int64_t, int64_t, int64_t, const float*, const float*, int64_t,
                      float*, int64_t, int64_t);
CBATCH_IMPORT(linear_int8)(const float*, int64_t, int64_t, int64_t, const int8_t*, const float*,
                           const float*, int64_t, int64_t, float*, int64_t, int64_t);
CBATCH_IMPORT(linear_int8_groups)(const float*, int64_t, int64_t, int64_t, const uint8_t*,
                                  const float*, int64_t, float*, int64_t, int64_t);

namespace {

// Rows of `workspace` in turn, each part on a cache line of its own.
class Parts {
  public:
    explicit Parts(float* workspace) : next_(workspace) {}
    float* take(int64_t num_floats) {
        float* part = next_;
        next_ += (num_floats + 15) / 16 * 16;
        return part;
    }

  private:
    float* next_;
};

void multiply(const CbatchLinear& linear, const float* input, int64_t num_rows, float* output,
              int64_t num_threads) {
    switch (linear.format) {
        case kCbatchFloat32:
            CBATCH_CALL(linear)(input, linear.depth, num_rows, linear.depth,
                                static_cast<const float*>(linear.packed), linear.bias,
                                linear.num_columns, output, linear.num_columns, num_threads);
            break;
        case kCbatchInt8:
            CBATCH_CALL(linear_int8)(input, linear.depth, num_rows, linear.depth,
                                     static_cast<const int8_t*>(linear.packed), linear.scales,
                                     linear.bias, linear.num_columns, linear.group, output,
                                     linear.num_columns, num_threads);
            break;
        case kCbatchInt8Groups:
            CBATCH_CALL(linear_int8_groups)(input, linear.depth, num_rows, linear.depth,
                                            static_cast<const uint8_t*>(linear.packed),
                                            linear.bias, linear.num_columns, output,
                                            linear.num_columns, num_threads);
            break;
    }
}

void add(const CbatchNorm* added_norm, const float* added, const CbatchNorm* norm, float* output,
         int64_t num_rows, const CbatchLayer& layer) {
    const CbatchNorm none{nullptr, 0.0f};
    const CbatchNorm& before = added_norm == nullptr ? none : *added_norm;
    const CbatchNorm& after = norm == nullptr ? none : *norm;
    CBATCH_CALL(add_norm)(added, before.weight, before.epsilon, layer.residual, after.weight,
                          after.epsilon, output, num_rows, layer.dim,
                          layer.attention.num_threads);
}

void gather(const float* from, const CbatchLayer& layer, int64_t size, float* to) {
    for (int64_t row = 0; row < layer.num_rows; ++row) {
        std::memcpy(to + row * size, from + layer.rows[row] * size,
                    static_cast<size_t>(size) * sizeof(float));
    }
}

// As `CbatchAttention` says: the first query of each sequence that comes out, or its end.
void find_first_queries(const CbatchLayer& layer, int32_t* first_queries) {
    const int64_t num_seqs = layer.attention.num_seqs;
    const int32_t* starts = layer.attention.query_start_loc;
    for (int64_t s = 0; s < num_seqs; ++s) first_queries[s] = starts[s + 1] - starts[s];
    for (int64_t row = 0; row < layer.num_rows; ++row) {
        const int32_t token = static_cast<int32_t>(layer.rows[row]);
        const int64_t s = std::upper_bound(starts, starts + num_seqs + 1, token) - starts - 1;
        // Tokens that belong to no sequence come after all others.
        if (s < num_seqs) first_queries[s] = std::min(first_queries[s], token - starts[s]);
    }
}

}  // namespace

CBATCH_EXPORT(decoder_layer)(const CbatchLayer* layer) {
    CbatchAttention attention = layer->attention;
    const int64_t num_tokens = attention.num_tokens, num_threads = attention.num_threads;
    const int64_t num_rows = layer->num_rows;
    const bool is_pruned = num_rows < num_tokens;
    const int64_t query_size = attention.num_heads * attention.head_dim;
    const int64_t key_size = attention.num_kv_heads * attention.head_dim;
    const int64_t attended_size = attention.num_heads * attention.value_head_dim;
    const int64_t qkv_size = layer->qkv.num_columns, mlp_size = layer->down.depth;
    Parts parts(layer->workspace);
    float* normed = parts.take(num_tokens * layer->dim);
    float* projected = parts.take(num_tokens * layer->dim);
    float* qkv = parts.take(num_tokens * qkv_size);
    float* attended = parts.take(num_tokens * attended_size);
    float* gathered = parts.take(num_rows * attended_size);
    float* gate_up = parts.take(num_rows * 2 * mlp_size);
    float* activated = parts.take(num_rows * mlp_size);

    std::memcpy(layer->residual, layer->hidden_states,
                static_cast<size_t>(num_tokens * layer->dim) * sizeof(float));
    add(nullptr, nullptr, &layer->input_norm, normed, num_tokens, *layer);
    multiply(layer->qkv, normed, num_tokens, qkv, num_threads);
    CBATCH_CALL(norm_rope)(qkv, qkv_size, num_tokens, attention.num_heads,
                           attention.num_heads + attention.num_kv_heads, attention.head_dim,
                           layer->query_norm.weight, layer->key_norm.weight,
                           layer->query_norm.epsilon, layer->cosines, layer->sines,
                           layer->rotary_dim, num_threads);
    attention.query = qkv;
    attention.key = qkv + query_size;
    attention.value = qkv + query_size + key_size;
    attention.query_token_stride = attention.key_token_stride = attention.value_token_stride =
        qkv_size;
    attention.query_head_stride = attention.key_head_stride = attention.head_dim;
    attention.value_head_stride = attention.value_head_dim;
    attention.output = attended;
    const Scratch first_queries(static_cast<size_t>(attention.num_seqs) * sizeof(int32_t));
    if (is_pruned) {
        find_first_queries(*layer, first_queries.as<int32_t>());
        attention.first_queries = first_queries.as<int32_t>();
    }
    CBATCH_CALL(attention)(&attention);
    // Tokens that belong to no sequence attend to nothing.
    const int64_t num_covered = attention.query_start_loc[attention.num_seqs];
    std::memset(attended + num_covered * attended_size, 0,
                static_cast<size_t>((num_tokens - num_covered) * attended_size) * sizeof(float));
    if (is_pruned) {
        gather(attended, *layer, attended_size, gathered);
        gather(layer->hidden_states, *layer, layer->dim, layer->residual);
    }

    multiply(layer->output, is_pruned ? gathered : attended, num_rows, projected, num_threads);
    add(&layer->post_attention_norm, projected, &layer->pre_mlp_norm, normed, num_rows, *layer);
    multiply(layer->gate_up, normed, num_rows, gate_up, num_threads);
    CBATCH_CALL(activate_and_multiply)(gate_up, activated, num_rows, mlp_size, layer->activation,
                                       num_threads);
    multiply(layer->down, activated, num_rows, projected, num_threads);
    add(&layer->post_mlp_norm, projected, nullptr, nullptr, num_rows, *layer);
}
