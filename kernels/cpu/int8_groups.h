// Weights and activations of 8 bits, rounded by groups of kGroup depths: the format of panels and
// of rows, and the product of a few of their integers.
//
// In a group a weight is `scale * q`, with one scale per output column, and an activation is
// `middle + scale * a`, with one middle and one scale per row; q and a are from -127 to 127. So
//
//     sum of w x = w_scale * x_scale * (sum of q a) + middle * (w_scale * sum of q)
//
// Weights are stored as q + 128, since vpdpbusd multiplies unsigned bytes by signed ones: a row's
// sums start at -128 times the sum of its a.
#pragma once

#include "gemm.h"

namespace {

constexpr int kGroup = 64;
constexpr int kQuad = 4;  // depths that one step multiplies
constexpr int kQuadsPerGroup = kGroup / kQuad;
// A panel is a sequence of steps of so many bytes. Each group has one for every quad, then one with
// the columns' scales and one with their scaled sums, both float32.
constexpr int kStepBytes = kQuad * kPanel;
constexpr int kStepsOfScales = 2;
// Rows per tile: integer and float accumulators share the registers.
constexpr int kMaxGroupedRows = kWidth == 16 ? 7 : (kWidth == 8 ? 4 : 2);

// The groups of a product's depth, and the steps of one of its panels.
struct Groups {
    int64_t depth, count, num_quads;

    explicit Groups(int64_t depth_of_product)
        : depth(depth_of_product),
          count(ceil_div(depth, kGroup)),
          num_quads(ceil_div(depth, kQuad)) {}
    int64_t num_steps() const { return num_quads + kStepsOfScales * count; }
    int64_t panel_bytes() const { return num_steps() * kStepBytes; }
    int quads_of(int64_t group) const {
        const int64_t left = num_quads - group * kQuadsPerGroup;
        return static_cast<int>(left < kQuadsPerGroup ? left : kQuadsPerGroup);
    }
    int depths_of(int64_t group) const {
        const int64_t left = depth - group * kGroup;
        return static_cast<int>(left < kGroup ? left : kGroup);
    }
};

#if defined(__AVX512VNNI__)

typedef int32_t RowQuad;  // four int8
typedef __m512i WeightQuads;

CBATCH_INLINE RowQuad row_quad(const int8_t* values) {
    RowQuad quad;
    std::memcpy(&quad, values, sizeof(quad));
    return quad;
}

CBATCH_INLINE WeightQuads load_quads(const uint8_t* from) { return _mm512_loadu_si512(from); }

CBATCH_INLINE IntVec add_products(IntVec sums, WeightQuads weights, RowQuad quad) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, weights, _mm512_set1_epi32(quad));
}

#elif defined(__AVX2__)

// vpmaddubsw would saturate: bytes are widened, those of even and of odd depths apart.
struct RowQuad {
    int16_t even[2], odd[2];
};
struct WeightQuads {
    __m256i even, odd;
};

CBATCH_INLINE RowQuad row_quad(const int8_t* values) {
    return {{values[0], values[2]}, {values[1], values[3]}};
}

CBATCH_INLINE WeightQuads load_quads(const uint8_t* from) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i_u*)from);
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(bytes, 8)};
}

CBATCH_INLINE IntVec add_products(IntVec sums, WeightQuads weights, RowQuad quad) {
    int32_t even, odd;
    std::memcpy(&even, quad.even, sizeof(even));
    std::memcpy(&odd, quad.odd, sizeof(odd));
    const __m256i evens = _mm256_madd_epi16(weights.even, _mm256_set1_epi32(even));
    const __m256i odds = _mm256_madd_epi16(weights.odd, _mm256_set1_epi32(odd));
    return sums + ((IntVec)evens + (IntVec)odds);
}

#else

struct RowQuad {
    int8_t values[kQuad];
};
typedef UintVec WeightQuads;  // four bytes per column

CBATCH_INLINE RowQuad row_quad(const int8_t* values) {
    return {{values[0], values[1], values[2], values[3]}};
}

CBATCH_INLINE WeightQuads load_quads(const uint8_t* from) {
    WeightQuads quads;
    std::memcpy(&quads, from, sizeof(quads));
    return quads;
}

CBATCH_INLINE IntVec add_products(IntVec sums, WeightQuads weights, RowQuad quad) {
    CBATCH_UNROLL
    for (int i = 0; i < kQuad; ++i) {
        sums += (IntVec)((weights >> (8 * i)) & 0xFFu) * static_cast<int32_t>(quad.values[i]);
    }
    return sums;
}

#endif

// Rounded rows, tile by tile: within a tile of R rows there are R entries for every quad or group.
struct RoundedRows {
    RowQuad* quads;   // [tile, num_quads, R]
    int32_t* starts;  // [tile, groups, R], as are the rest: what the sums of integers start at
    float* scales;
    float* middles;
};

}  // namespace
