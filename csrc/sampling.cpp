// The greedy draw.

#include <limits>

#include "vec.h"

namespace {

using namespace labkit;

float largest(const float* x, int64_t count) {
    constexpr int64_t SUMS = 4;  // maxima on their way at once
    vec most[SUMS];
    for (vec& m : most) m = vec{} - std::numeric_limits<float>::infinity();
    int64_t i = 0;
    for (; i + SUMS * LANES <= count; i += SUMS * LANES)
        for (int64_t s = 0; s < SUMS; s++) {
            const vec v = load(x + i + s * LANES);
            most[s] = v > most[s] ? v : most[s];
        }
    float best = -std::numeric_limits<float>::infinity();
    for (const vec& m : most)
        for (int64_t lane = 0; lane < LANES; lane++) best = m[lane] > best ? m[lane] : best;
    for (; i < count; i++) best = x[i] > best ? x[i] : best;
    return best;
}

}  // namespace

// out[r] = the first index of the largest number of row r; x [rows, width] with rows x_stride apart
extern "C" void labkit_argmax(const float* x, int64_t x_stride, int64_t* out, int64_t rows, int64_t width) {
    constexpr int64_t PIECE = 1024;  // only the first piece with the largest number is searched for its place
#pragma omp parallel for schedule(static) if (rows * width > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * x_stride;
        float best = -std::numeric_limits<float>::infinity();
        int64_t first = 0;
        for (int64_t begin = 0; begin < width; begin += PIECE) {
            const float here = largest(row + begin, width - begin < PIECE ? width - begin : PIECE);
            if (here > best) best = here, first = begin;
        }
        while (first < width - 1 && row[first] != best) first++;
        out[r] = first;
    }
}
