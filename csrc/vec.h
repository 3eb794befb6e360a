// A vector of floats as wide as this CPU's registers, through the compiler's vector extension: the same source becomes
// AVX-512, AVX2, SSE or NEON code, whatever -march=native says.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#define LABKIT_LANES 16
#elif defined(__AVX__)
#define LABKIT_LANES 8
#else
#define LABKIT_LANES 4
#endif

namespace labkit {

constexpr int64_t LANES = LABKIT_LANES;
typedef float vec __attribute__((vector_size(LABKIT_LANES * sizeof(float))));

inline vec load(const float* p) {  // p need not be aligned
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

// The two halves of a vector are added until one lane is left: the same order for every caller.
template <int64_t WIDTH>
inline float sum_halves(const void* lanes) {
    if constexpr (WIDTH == 1) {
        float total;
        std::memcpy(&total, lanes, sizeof total);
        return total;
    } else {
        typedef float half __attribute__((vector_size(WIDTH / 2 * sizeof(float))));
        half low, high;
        std::memcpy(&low, lanes, sizeof low);
        std::memcpy(&high, static_cast<const char*>(lanes) + sizeof low, sizeof high);
        low += high;
        return sum_halves<WIDTH / 2>(&low);
    }
}

inline float sum(vec v) { return sum_halves<LANES>(&v); }

// e^x to about 1e-7: e^x = 2^n * e^r with n whole and |r| <= ln(2) / 2, and e^r by its series.
inline vec exp(vec x) {
    typedef int32_t ivec __attribute__((vector_size(LABKIT_LANES * sizeof(int32_t))));
    x = x < -87.0f ? vec{} - 87.0f : x;  // what is smaller is as good as 0, and larger exponents do not exist
    x = x > 88.0f ? vec{} + 88.0f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const vec n = (x * 1.44269504f + magic) - magic;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, so that no digits are lost
    vec p = vec{} + 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// A vector of the first n numbers at p, the rest filled up.
inline vec load_some(const float* p, int64_t n, float fill) {
    vec v = vec{} + fill;
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}

inline float dot(const float* a, const float* b, int64_t n) {
    vec total = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(a + i) * load(b + i);
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return sum(total) + rest;
}

}  // namespace labkit
