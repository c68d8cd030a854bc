// Arguments of a decoder layer. The same structs are declared in kernels/cpu_library.py.
#pragma once

#include "attention.h"

// How a weight is packed.
enum CbatchWeightFormat : int64_t {
    kCbatchFloat32 = 0,
    kCbatchInt8 = 1,        // with a scale per column and group of depths
    kCbatchInt8Groups = 2,  // with scales that are packed too, see int8_groups.h
};

struct CbatchLinear {
    const void* packed;
    const float* scales;  // of kCbatchInt8
    const float* bias;    // or null
    int64_t num_columns, depth;
    int64_t group;  // of kCbatchInt8: depths that share a scale
    CbatchWeightFormat format;
};

// RMSNorm; a weight that is null norms nothing.
struct CbatchNorm {
    const float* weight;
    float epsilon;
};

struct CbatchLayer {
    const float* hidden_states;  // [num_tokens, dim]
    float* residual;             // [num_tokens, dim]; the first num_rows are what comes out
    float* workspace;
    const float* cosines;  // [num_tokens, rotary_dim]
    const float* sines;
    // [num_rows]: the tokens that come out, in any order, again and again if need be. Not read if
    // num_rows is num_tokens: then all come out, in their order.
    const int64_t* rows;
    int64_t num_rows;  // num_tokens at most
    int64_t dim, rotary_dim, activation;
    CbatchNorm input_norm, query_norm, key_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
    CbatchLinear qkv, output, gate_up, down;
    CbatchAttention attention;  // without queries, keys, values and output
};
