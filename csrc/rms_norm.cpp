// RMSNorm in float32, alone and with the residual sum before it.

#include "vec.h"

namespace {

using namespace labkit;

void normalise(const float* x, const float* weight, float* y, int64_t width, float eps) {
    const float scale = 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

}  // namespace

// y = x / rms(x) * weight; x [rows, width] with rows x_stride apart, y [rows, width]
extern "C" void labkit_rms_norm(const float* x, int64_t x_stride, const float* weight, float* y, int64_t rows,
                                int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t r = 0; r < rows; r++) normalise(x + r * x_stride, weight, y + r * width, width, eps);
}

// residual += x, then y = residual / rms(residual) * weight. Element (r, i) of x is at x[r * row_stride + i * stride]:
// x may be the transposed result of a matrix product.
extern "C" void labkit_add_rms_norm(const float* x, int64_t row_stride, int64_t stride, float* residual,
                                    const float* weight, float* y, int64_t rows, int64_t width, float eps) {
    constexpr int64_t TILE = 16;  // rows whose elements of one column share a cache line when x is transposed
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t first = 0; first < rows; first += TILE) {
        const int64_t count = rows - first < TILE ? rows - first : TILE;
        if (stride == 1) {
            for (int64_t r = first; r < first + count; r++)
                for (int64_t i = 0; i < width; i++) residual[r * width + i] += x[r * row_stride + i];
        } else {
            for (int64_t i = 0; i < width; i++)
                for (int64_t r = first; r < first + count; r++)
                    residual[r * width + i] += x[r * row_stride + i * stride];
        }
        for (int64_t r = first; r < first + count; r++)
            normalise(residual + r * width, weight, y + r * width, width, eps);
    }
}
