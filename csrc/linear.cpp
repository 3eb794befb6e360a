// y = x Wᵀ + b in float32, for up to 16 rows of x: the matrix products of a decode step.
//
// W is read from memory once, whatever the number of rows, and nothing else counts: one row needs two operations for
// four bytes. So a few rows of W are taken at a time, each loaded vector of them is used for every row of x, and x (a
// few kilobytes) stays in the cache. A BLAS library packs W first, which is worth it for hundreds of rows only.
//
//                    i →                         accumulators in registers
//     W  o+0  [ ─ ─ ─ ■ ─ ─ ─ ]                  x row 0   x row 1   …
//        o+1  [ ─ ─ ─ ■ ─ ─ ─ ]          o+0       ■         ■
//     x  0    [ ─ ─ ─ ■ ─ ─ ─ ]          o+1       ■         ■
//        1    [ ─ ─ ─ ■ ─ ─ ─ ]
//
// A row of y comes out the same, bit by bit, whatever rows are beside it.

#include "vec.h"

namespace {

using namespace labkit;

// ROWS rows of x times WIDE rows of W. x [ROWS, in], w [WIDE, in] -> y[row * y_stride + o].
template <int ROWS, int WIDE>
void tile(const float* x, int64_t x_stride, const float* w, const float* bias, float* y, int64_t y_stride, int64_t in) {
    vec total[ROWS][WIDE] = {};
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) {
        vec weights[WIDE];
        for (int o = 0; o < WIDE; o++) {
            weights[o] = load(w + o * in + i);
            __builtin_prefetch(w + (o + WIDE) * in + i);  // the next tile's
        }
        for (int r = 0; r < ROWS; r++) {
            vec input = load(x + r * x_stride + i);
            for (int o = 0; o < WIDE; o++) total[r][o] += input * weights[o];
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int o = 0; o < WIDE; o++) {
            float rest = 0;
            for (int64_t j = i; j < in; j++) rest += x[r * x_stride + j] * w[o * in + j];
            y[r * y_stride + o] = sum(total[r][o]) + rest + (bias ? bias[o] : 0.0f);
        }
    }
}

// All rows of x times WIDE rows of W, in groups that fit the registers.
template <int WIDE>
void rows(const float* x, int64_t x_stride, const float* w, const float* bias, float* y, int64_t y_stride,
          int64_t count, int64_t in) {
    int64_t r = 0;
    auto group = [&](auto* kernel, int64_t size) {
        for (; r + size <= count; r += size)
            kernel(x + r * x_stride, x_stride, w, bias, y + r * y_stride, y_stride, in);
    };
    group(tile<8, WIDE>, 8);
    group(tile<4, WIDE>, 4);
    group(tile<2, WIDE>, 2);
    group(tile<1, WIDE>, 1);
}

// All rows of x times all of W, whose rows are shared out among the threads.
template <int WIDE>
void product(const float* x, int64_t x_stride, const float* w, const float* bias, float* y, int64_t count, int64_t in,
             int64_t out) {
    const int64_t tiles = out / WIDE;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t o = t * WIDE;
        rows<WIDE>(x, x_stride, w + o * in, bias ? bias + o : nullptr, y + o, out, count, in);
    }
    for (int64_t o = tiles * WIDE; o < out; o++)
        rows<1>(x, x_stride, w + o * in, bias ? bias + o : nullptr, y + o, out, count, in);
}

}  // namespace

// x [count, in] with rows x_stride apart, w [out, in], bias [out] or null -> y [count, out]
extern "C" void labkit_linear(const float* x, int64_t x_stride, const float* w, const float* bias, float* y,
                              int64_t count, int64_t in, int64_t out) {
    // How many rows of W are taken together: enough loads in flight to keep the memory busy, and no more accumulators
    // than registers (AVX-512 has 32, the others count as 16 here).
    constexpr bool many = LANES == 16;
    auto* kernel = count == 1   ? product<many ? 8 : 4>
                   : count <= 4 ? product<many ? 4 : 2>
                                : product<many ? 3 : 1>;
    kernel(x, x_stride, w, bias, y, count, in, out);
}
