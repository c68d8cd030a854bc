// Which variant of the kernels this processor can run best.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t cbatch_interface_version() { return 9; }

// Bit 0: AVX2 with FMA. Bit 1: AVX512 with the byte, word and dot-product instructions.
extern "C" __attribute__((visibility("default"))) int32_t cbatch_processor_features() {
    int32_t features = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) features |= 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
        features |= 2;
    }
#endif
    return features;
}
