// SiLU(gate) * up in float32.

#include "vec.h"

namespace {

using namespace labkit;

vec silu_mul(vec gate, vec up) { return gate / (1.0f + exp(-gate)) * up; }

}  // namespace

// gate and up: `rows` rows of `width` numbers, each row `stride` after the one before -> out [rows, width]
extern "C" void labkit_silu_mul(const float* gate, const float* up, int64_t stride, float* out, int64_t rows,
                                int64_t width) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float *g = gate + r * stride, *u = up + r * stride;
        float* y = out + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(y + i, silu_mul(load(g + i), load(u + i)));
        if (i < width) {
            const vec last = silu_mul(load_some(g + i, width - i, 0), load_some(u + i, width - i, 0));
            std::memcpy(y + i, &last, (width - i) * sizeof(float));
        }
    }
}
