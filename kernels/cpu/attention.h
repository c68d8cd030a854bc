// Arguments of one layer's attention. The same struct is declared in kernels/cpu_library.py.
#pragma once

#include <cstdint>

// Strides count elements; the last dimension of every array is contiguous.
struct CbatchAttention {
    const float* query;  // [num_tokens, num_heads, head_dim]
    int64_t query_token_stride, query_head_stride;
    const float* key;  // [num_tokens, num_kv_heads, head_dim]
    int64_t key_token_stride, key_head_stride;
    const float* value;  // [num_tokens, num_kv_heads, value_head_dim]
    int64_t value_token_stride, value_head_stride;
    float* output;  // [num_tokens, num_heads, value_head_dim], contiguous
    void* k_cache;  // float or BFloat16
    int64_t k_block_stride, k_slot_stride, k_head_stride;
    void* v_cache;
    int64_t v_block_stride, v_slot_stride, v_head_stride;
    const int32_t* block_tables;  // [num_seqs, block_table_stride]
    int64_t block_table_stride;
    const int32_t* query_start_loc;  // [num_seqs + 1]
    const int32_t* seq_lens;         // [num_seqs]
    const int64_t* slot_mapping;     // [num_tokens]; -1 stores nothing
    const float* sinks;              // [num_heads], or null
    const int32_t* first_queries;    // [num_seqs]: queries before the first computed one; null: 0
    float scale;
    float softcap;   // 0: none
    int64_t window;  // positions seen, the token's own included; 0: all
    int64_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, value_head_dim, block_size;
    int64_t cache_is_bfloat16;
    int64_t num_threads;
};
