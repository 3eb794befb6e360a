// Rotary position embedding in float32: dimension i of a head is turned together with dimension i + D/2.

#include "vec.h"

namespace {

using namespace labkit;

// (a, b) -> (a cos - b sin, b cos + a sin); a and b are the two halves of a head, n numbers each
void turn(const float* a, const float* b, const float* cos, const float* sin, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vec x = load(a + i), y = load(b + i), c = load(cos + i), s = load(sin + i);
        store(out + i, x * c - y * s);
        store(out + n + i, y * c + x * s);
    }
    for (; i < n; i++) {
        out[i] = a[i] * cos[i] - b[i] * sin[i];
        out[n + i] = b[i] * cos[i] + a[i] * sin[i];
    }
}

}  // namespace

// x [tokens, heads, D] with tokens `stride` apart, positions [tokens], table [length, D] (D/2 cosines, then D/2 sines)
// -> out [tokens, heads, D]
extern "C" void labkit_rope(const float* x, int64_t stride, const int32_t* positions, const float* table, float* out,
                            int64_t tokens, int64_t heads, int64_t head_size) {
    const int64_t half = head_size / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * head_size > 16384)
    for (int64_t t = 0; t < tokens; t++) {
        const float* angles = table + positions[t] * head_size;
        for (int64_t h = 0; h < heads; h++) {
            const float* head = x + t * stride + h * head_size;
            turn(head, head + half, angles, angles + half, out + (t * heads + h) * head_size, half);
        }
    }
}
