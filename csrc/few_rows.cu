// x Wᵀ for 1 to 8 rows, with what stands around it in a decode step: RMSNorm in front, SiLU × mul or the residual sum
// behind. The time is the time to read W, so all of it is about having W on its way, early and without a pause.
//
// A block makes OUTPUTS columns of the result. Its warps share the width: each takes CHUNK numbers of every row of W
// at a time, loaded straight into the registers that tensor cores read, with no shared memory between. That works
// because the order of a sum does not matter, as long as both operands have the same one. mma wants from lane (g, t)
// the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of row g; it gets eight numbers that lie side by side instead, for two
// products of 16 columns each:
//
//     memory, 32 columns of row g    │ lane t = 0: 8 numbers │ t = 1 │ t = 2 │ t = 3 │
//     what mma takes them for        │ 0 1 8 9 of product 0, 0 1 8 9 of product 1 │ 2 3 10 11 … │ …
//
// W is the left operand (16 rows of it), x the right one (8 rows), so nothing is padded but x.
//
// RMSNorm multiplies a row by a number that all its columns share: rows enter as x × weight, their squares are added up
// on the way, and the sums are scaled at the end. So the norm costs no pass over x, and no wait.
//
// On Hopper the first weights are loaded before the kernel in front has ended (programmatic dependent launch).

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gpu.cuh"
#include "tensor_cores.cuh"

namespace {

using namespace labkit;

constexpr int MOST_WARPS = 16, MOST_ROWS = 8;
constexpr int STEPS = 8, CHUNK = 32 * STEPS;  // columns of W that a warp has on their way
constexpr int ENOUGH_WARPS = 2048;            // in all blocks; a warp then takes one chunk after the other

struct Product {
    const void* x;         // [rows, width], rows x_step apart
    const void* norm;      // [width], or null: x is not normed
    const void* weight;    // [outputs, width]; gated: the gate's rows, then as many of up
    const void* bias;      // [outputs], or null
    const void* residual;  // [rows, outputs], rows residual_step apart, or null: nothing is added
    void* out;             // [rows, outputs]
    int64_t x_step, residual_step;
    int rows, width, outputs;
    float eps;
};

// x × weight, rounded; adds x² to `squares`.
__device__ inline uint32_t scale_pair(uint32_t x, uint32_t weight, float& squares) {
    const auto pair = reinterpret_cast<const __nv_bfloat162&>(x);
    const float2 both = __bfloat1622float2(pair);
    squares = fmaf(both.x, both.x, fmaf(both.y, both.y, squares));
    const __nv_bfloat162 scaled = __hmul2(pair, reinterpret_cast<const __nv_bfloat162&>(weight));
    return reinterpret_cast<const uint32_t&>(scaled);
}

// Which of the block's results number i is. Sums lie as mma gives them: lane l has those of outputs l / 4 (0 and 1) and
// l / 4 + 8 (2 and 3), for rows 2 (l % 4) and the next.
template <bool GATED>
struct Place {
    int sum, row, output;
    bool there;

    __device__ Place(int i, const Product& p) {
        constexpr int OUTPUTS = GATED ? 8 : 16;
        sum = GATED ? i / 2 * 4 + i % 2 : i;
        row = sum / 4 % 4 * 2 + sum % 2;
        output = blockIdx.x * OUTPUTS + sum / 16 + sum / 2 % 2 * 8;
        there = i < OUTPUTS * MOST_ROWS && row < p.rows && output < p.outputs;
    }
};

template <typename T, bool GATED, bool NORM>
__global__ void __launch_bounds__(MOST_WARPS * 32) few_rows(const Product p) {
    constexpr int OUTPUTS = GATED ? 8 : 16;
    extern __shared__ uint4 norm[];
    __shared__ float sums_of[MOST_WARPS][32 * 4];
    __shared__ float squares_of[MOST_WARPS][MOST_ROWS];
    let_next_begin();
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * OUTPUTS + g, second = first + (GATED ? p.outputs : 8);
    const bool has_first = first < p.outputs, has_second = GATED ? has_first : second < p.outputs;
    const T* weight = static_cast<const T*>(p.weight);
    const T *row = weight + static_cast<int64_t>(first) * p.width + 8 * t,
            *second_row = weight + static_cast<int64_t>(second) * p.width + 8 * t;
    uint4 a[STEPS][2];
    auto load_weights = [&](int step, int begin) {
        const int at = begin + 32 * step;
        const bool inside = at + 8 * t < p.width;
        a[step][0] = load_once(row + at, inside && has_first);
        a[step][1] = load_once(second_row + at, inside && has_second);
    };
    int begin = warp * CHUNK;
#pragma unroll
    for (int step = 0; step < STEPS; step++) load_weights(step, begin);
    if (NORM) {  // no kernel in front has written it, either
        for (int i = threadIdx.x; i < p.width / 8; i += blockDim.x) norm[i] = static_cast<const uint4*>(p.norm)[i];
        __syncthreads();
    }
    // What the end needs besides the sums, for this thread's first result (in narrow matrices its only one).
    const Place<GATED> early(threadIdx.x, p);
    const float early_bias = p.bias && early.there ? wide(static_cast<const T*>(p.bias)[early.output]) : 0;
    wait_for_previous();
    const T* residual = static_cast<const T*>(p.residual);
    const float early_residual = residual && early.there ? wide(residual[early.row * p.residual_step + early.output]) : 0;

    float sums[4] = {0, 0, 0, 0}, squares = 0;
    const T* x = static_cast<const T*>(p.x) + g * p.x_step + 8 * t;
    for (; begin < p.width; begin += warps * CHUNK) {
        uint4 b[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int at = begin + 32 * step;
            b[step] = uint4{0, 0, 0, 0};
            if (g < p.rows && at + 8 * t < p.width) b[step] = *reinterpret_cast<const uint4*>(x + at);
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (NORM) {
                const int at = begin + 32 * step + 8 * t;
                uint4 scale{0, 0, 0, 0};
                if (at < p.width) scale = norm[at / 8];
                b[step].x = scale_pair(b[step].x, scale.x, squares);
                b[step].y = scale_pair(b[step].y, scale.y, squares);
                b[step].z = scale_pair(b[step].z, scale.z, squares);
                b[step].w = scale_pair(b[step].w, scale.w, squares);
            }
            const uint4 top = a[step][0], bottom = a[step][1];
            const uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y}, high[4] = {top.z, bottom.z, top.w, bottom.w};
            mma<T>(sums, low, b[step].x, b[step].y);
            mma<T>(sums, high, b[step].z, b[step].w);
            load_weights(step, begin + warps * CHUNK);
        }
    }

    reinterpret_cast<float4&>(sums_of[warp][4 * lane]) = float4{sums[0], sums[1], sums[2], sums[3]};
    if (NORM) {
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        if (t == 0) squares_of[warp][g] = squares;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OUTPUTS * MOST_ROWS; i += blockDim.x) {
        const Place<GATED> place(i, p);
        if (!place.there) continue;
        float bias = early_bias, added = early_residual;
        if (i >= static_cast<int>(blockDim.x)) {
            if (p.bias) bias = wide(static_cast<const T*>(p.bias)[place.output]);
            if (residual) added = wide(residual[place.row * p.residual_step + place.output]);
        }
        float sum = 0, up = 0, square = 0;
        for (int w = 0; w < warps; w++) {
            sum += sums_of[w][place.sum];
            if (GATED) up += sums_of[w][place.sum + 2];
            if (NORM) square += squares_of[w][place.row];
        }
        if (NORM) {
            const float scale = rsqrtf(square / p.width + p.eps);
            sum *= scale, up *= scale;
        }
        T result = narrow<T>(sum + bias);
        if (GATED) {  // rounded wherever the operations one by one round
            const float gate = wide(result);
            result = narrow<T>(wide(narrow<T>(gate / (1 + __expf(-gate)))) * wide(narrow<T>(up)));
        }
        if (residual) result = narrow<T>(wide(result) + added);
        static_cast<T*>(p.out)[static_cast<int64_t>(place.row) * p.outputs + place.output] = result;
    }
}

template <typename T, bool GATED, bool NORM>
cudaError_t launch(const Product& p, bool early, cudaStream_t stream) {
    constexpr int OUTPUTS = GATED ? 8 : 16;
    const int blocks = (p.outputs + OUTPUTS - 1) / OUTPUTS, chunks = (p.width + CHUNK - 1) / CHUNK;
    const int warps = std::min({(ENOUGH_WARPS + blocks - 1) / blocks, chunks, MOST_WARPS});
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(32 * warps);
    config.dynamicSmemBytes = NORM ? p.width * 2 : 0;
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, few_rows<T, GATED, NORM>, p);
}

template <typename T>
cudaError_t launch(const Product& p, bool gated, bool early, cudaStream_t stream) {
    if (!p.norm) return gated ? launch<T, true, false>(p, early, stream) : launch<T, false, false>(p, early, stream);
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return gated ? launch<T, true, true>(p, early, stream) : launch<T, false, true>(p, early, stream);
    return cudaErrorInvalidValue;
}

}  // namespace

// Shapes as in Product, whose fields these are; steps in numbers, width a multiple of 8 and with a norm at most 16384,
// x, norm and weight at addresses and steps that are multiples of 16 bytes. early: begin before the kernel in front has ended. Returns a cudaError_t.
extern "C" int labkit_few_rows(const void* x, const void* norm, const void* weight, const void* bias,
                               const void* residual, void* out, int64_t x_step, int64_t residual_step, int64_t rows,
                               int64_t width, int64_t outputs, float eps, int64_t gated, int64_t bfloat16,
                               int64_t early, void* stream) {
    Product p{x, norm, weight, bias, residual, out};
    p.x_step = x_step, p.residual_step = residual_step, p.eps = eps;
    p.rows = static_cast<int>(rows), p.width = static_cast<int>(width), p.outputs = static_cast<int>(outputs);
    const auto s = static_cast<cudaStream_t>(stream);
    return bfloat16 ? launch<__nv_bfloat16>(p, gated, early, s) : launch<__half>(p, gated, early, s);
}
