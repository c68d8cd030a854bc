// What lies between the products of a decoder layer, in float32, each in one pass over its rows.

#include <cmath>

#include "vector.h"

namespace {

// Rows below this much work run on one thread: waking others costs more.
constexpr int64_t kWorthThreads = 16384;

// 1 / sqrt(mean of squares + epsilon).
CBATCH_INLINE float inverse_rms(const float* row, int64_t dim, float epsilon) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kWidth <= dim; i += 4 * kWidth) {
        CBATCH_UNROLL
        for (int v = 0; v < 4; ++v) {
            const Vec value = load(row + i + v * kWidth);
            sums[v] += value * value;
        }
    }
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < dim; ++i) total += row[i] * row[i];
    return 1.0f / std::sqrt(total / static_cast<float>(dim) + epsilon);
}

CBATCH_INLINE void scale_by_weight(const float* from, float factor, const float* weight, float* to,
                                   int64_t dim) {
    int64_t i = 0;
    for (; i + kWidth <= dim; i += kWidth) {
        store(to + i, (load(from + i) * factor) * load(weight + i));
    }
    for (; i < dim; ++i) to[i] = (from[i] * factor) * weight[i];
}

CBATCH_INLINE Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// x * (1 + tanh(u)) / 2 is x / (1 + e^(-2u)), which loses nothing where tanh(u) is near -1.
CBATCH_INLINE Vec gelu_tanh(Vec x) {
    const Vec inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return x / (1.0f + exponential(-2.0f * inner));
}

template <Vec (*ACTIVATION)(Vec)>
void activate_row(const float* gate, const float* up, float* to, int64_t size) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) {
        store(to + i, ACTIVATION(load(gate + i)) * load(up + i));
    }
    for (; i < size; ++i) to[i] = ACTIVATION(splat(gate[i]))[0] * up[i];
}

}  // namespace

// residual += norm(input, input_weight) if there is an input (unchanged without input_weight);
// output = norm(residual, weight) if there is a weight. All rows are contiguous.
CBATCH_EXPORT(add_norm)(const float* input, const float* input_weight, float input_epsilon,
                        float* residual, const float* weight, float epsilon, float* output,
                        int64_t num_rows, int64_t dim, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads)) \
    if (num_rows * dim > kWorthThreads)
    for (int64_t row = 0; row < num_rows; ++row) {
        float* sum = residual + row * dim;
        if (input != nullptr) {
            const float* from = input + row * dim;
            const float factor =
                input_weight == nullptr ? 1.0f : inverse_rms(from, dim, input_epsilon);
            int64_t i = 0;
            for (; i + kWidth <= dim; i += kWidth) {
                Vec value = load(from + i);
                if (input_weight != nullptr) value = (value * factor) * load(input_weight + i);
                store(sum + i, load(sum + i) + value);
            }
            for (; i < dim; ++i) {
                const float scale = input_weight == nullptr ? 1.0f : input_weight[i];
                sum[i] += (from[i] * factor) * scale;
            }
        }
        if (weight != nullptr) {
            scale_by_weight(sum, inverse_rms(sum, dim, epsilon), weight, output + row * dim, dim);
        }
    }
}

// In place: each of the first `num_heads` heads of a token is normed if there is a weight for it,
// then its first `rotary_dim` values are rotated by halves. Query heads come first.
CBATCH_EXPORT(norm_rope)(float* heads, int64_t token_stride, int64_t num_tokens,
                         int64_t num_query_heads, int64_t num_heads, int64_t head_dim,
                         const float* query_weight, const float* key_weight, float epsilon,
                         const float* cosines, const float* sines, int64_t rotary_dim,
                         int64_t num_threads) {
    const int64_t half = rotary_dim / 2;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads)) \
    if (num_tokens * num_heads * head_dim > kWorthThreads)
    for (int64_t token = 0; token < num_tokens; ++token) {
        const float* cosine = cosines + token * rotary_dim;
        const float* sine = sines + token * rotary_dim;
        for (int64_t head = 0; head < num_heads; ++head) {
            float* row = heads + token * token_stride + head * head_dim;
            const float* weight = head < num_query_heads ? query_weight : key_weight;
            if (weight != nullptr) {
                scale_by_weight(row, inverse_rms(row, head_dim, epsilon), weight, row, head_dim);
            }
            int64_t i = 0;
            for (; i + kWidth <= half; i += kWidth) {
                const Vec low = load(row + i), high = load(row + half + i);
                store(row + i, low * load(cosine + i) - high * load(sine + i));
                store(row + half + i,
                      high * load(cosine + half + i) + low * load(sine + half + i));
            }
            for (; i < half; ++i) {
                const float low = row[i], high = row[half + i];
                row[i] = low * cosine[i] - high * sine[i];
                row[half + i] = high * cosine[half + i] + low * sine[half + i];
            }
        }
    }
}

// output[row, i] = activation(gate_up[row, i]) * gate_up[row, size + i]; rows are contiguous.
// activation 0: silu, 1: gelu in its tanh form.
CBATCH_EXPORT(activate_and_multiply)(const float* gate_up, float* output, int64_t num_rows,
                                     int64_t size, int64_t activation, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(num_threads)) \
    if (num_rows * size > kWorthThreads / 4)
    for (int64_t row = 0; row < num_rows; ++row) {
        const float* gate = gate_up + row * 2 * size;
        if (activation == 0) {
            activate_row<silu>(gate, gate + size, output + row * size, size);
        } else {
            activate_row<gelu_tanh>(gate, gate + size, output + row * size, size);
        }
    }
}
