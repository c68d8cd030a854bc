// Short vectors of float in the width of the instruction set that a file is compiled for.
//
// Every source file is compiled once per variant. All names here have internal linkage, so that
// the linker never merges code of one variant into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define CBATCH_JOIN_(name, variant) name##_##variant
#define CBATCH_JOIN(name, variant) CBATCH_JOIN_(name, variant)
// The exported name of a function in the variant being compiled.
#define CBATCH_EXPORT(name) \
    extern "C" __attribute__((visibility("default"))) void CBATCH_JOIN(cbatch_##name, CBATCH_VARIANT)

#define CBATCH_UNROLL _Pragma("GCC unroll 32")
#define CBATCH_INLINE inline __attribute__((always_inline))
// One copy of the code, so that every caller gets the same bits.
#define CBATCH_ONE_COPY __attribute__((noinline))

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t UintVec __attribute__((vector_size(4 * kWidth)));
typedef float UnalignedVec __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef uint32_t UnalignedUintVec
    __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kWidth)));
typedef uint16_t UnalignedHalfVec __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

// A float32 without its lower 16 bits.
struct BFloat16 {
    uint16_t bits;
};

CBATCH_INLINE Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }

CBATCH_INLINE Vec load(const BFloat16* from) {
    const HalfVec half = *reinterpret_cast<const UnalignedHalfVec*>(from);
    const UintVec wide = __builtin_convertvector(half, UintVec) << 16;
    return (Vec)wide;
}

CBATCH_INLINE void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }

CBATCH_INLINE float to_float(float value) { return value; }

CBATCH_INLINE float to_float(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

CBATCH_INLINE void convert(float value, float* to) { *to = value; }

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
CBATCH_INLINE void convert(float value, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (value != value) {
        to->bits = 0x7FC0;
    } else {
        to->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
}

CBATCH_INLINE void store(BFloat16* to, Vec value) {
    CBATCH_UNROLL
    for (int lane = 0; lane < kWidth; ++lane) convert(value[lane], to + lane);
}

CBATCH_INLINE Vec splat(float value) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(value);
#elif defined(__AVX2__)
    return _mm256_set1_ps(value);
#else
    return Vec{value, value, value, value};
#endif
}

// a * b + c, rounded once in every place or, without the instruction, twice in every place: left to
// the compiler, tails of loops would differ from one instance of a template to the next.
CBATCH_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

CBATCH_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

CBATCH_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// The sums over the lanes of four vectors, always added in the same order.
CBATCH_INLINE void sum_lanes(Vec a, Vec b, Vec c, Vec d, float* sums) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const auto fold = [](Vec v) __attribute__((always_inline)) {
        return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    };
    const __m256 a8 = fold(a), b8 = fold(b), c8 = fold(c), d8 = fold(d);
#else
    const __m256 a8 = a, b8 = b, c8 = c, d8 = d;
#endif
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a8, b8), _mm256_hadd_ps(c8, d8));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    const Vec* vectors[4] = {&a, &b, &c, &d};
    for (int index = 0; index < 4; ++index) {
        const Vec v = *vectors[index];
        sums[index] = (v[0] + v[1]) + (v[2] + v[3]);
    }
#endif
}

CBATCH_INLINE float sum_lanes(Vec value) {
    float sums[4];
    sum_lanes(value, value, value, value, sums);
    return sums[0];
}

// The largest lane; what it is when a lane is not a number is not said.
CBATCH_INLINE float max_lanes(Vec value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(value);
#elif defined(__AVX2__)
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
    float result = value[0];
    for (int lane = 1; lane < kWidth; ++lane) result = value[lane] > result ? value[lane] : result;
    return result;
#endif
}

// Whether a comparison holds anywhere.
CBATCH_INLINE bool any_lane(IntVec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// e^x to about one unit in the last place; 0 below the smallest normal number, -inf included.
CBATCH_INLINE Vec exponential(Vec x) {
    const float kLowest = -87.33654f, kHighest = 88.72283f;
    const float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Vec clamped = x < kLowest ? splat(kLowest) : x;
    clamped = clamped > kHighest ? splat(kHighest) : clamped;
    const Vec shifted = clamped * 1.44269504088896341f + kRounder;
    const Vec power = shifted - kRounder;
    Vec rest = clamped - power * 0.693359375f;
    rest = rest - power * -2.12194440e-4f;
    Vec series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * (rest * rest) + rest + 1.0f;
    // 2^128 has no float32: multiply by a half and by twice the power instead.
    const IntVec exponent = (IntVec)shifted - 0x4B400000;
    const IntVec half = exponent >> 1;
    const IntVec first = (half + 127) << 23, second = (exponent - half + 127) << 23;
    const Vec result = series * (Vec)first * (Vec)second;
    return x < kLowest ? Vec{} : (x != x ? x : result);
}

CBATCH_INLINE float exponential(float x) { return exponential(splat(x))[0]; }

// tanh(x); the series keeps the relative precision of small values.
CBATCH_INLINE Vec hyperbolic_tangent(Vec x) {
    const Vec square = x * x;
    Vec series = square * 0.021869488536155203f - 0.05396825396825397f;
    series = series * square + 0.13333333333333333f;
    series = series * square - 0.3333333333333333f;
    const Vec small = x + x * square * series;
    const Vec large = 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return square < 0.0625f ? small : large;
}

}  // namespace
