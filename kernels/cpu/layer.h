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
    float* residual;             // [num_tokens, dim]: what comes out
    float* workspace;
    const float* cosines;  // [num_tokens, rotary_dim]
    const float* sines;
    int64_t dim, rotary_dim, activation;
    CbatchNorm input_norm, query_norm, key_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
    CbatchLinear qkv, output, gate_up, down;
    CbatchAttention attention;  // without queries, keys, values and output
};
