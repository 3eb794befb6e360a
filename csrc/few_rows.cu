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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "tensor_cores.cuh"

namespace {

constexpr int MOST_WARPS = 16, MOST_ROWS = 8;

enum Kind { WIDE = 0, GATED = 1, NARROW = 2 };

struct Product {
    const void* x;       // [rows, width], rows x_step apart
    const void* norm;    // [width], or null: x is not normed
    const void* weight;  // [outputs, width]; gated: the gate's rows, then as many of up
    const void* bias;    // [outputs], or null
    const void* stream;  // [rows, outputs], rows stream_step apart, or null: nothing is added
    void* out;           // [rows, outputs]
    int64_t x_step, stream_step;
    int rows, width, outputs;
    float eps;
};

__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline __half narrow(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow(float x) {
    return __float2bfloat16_rn(x);
}

// 16 bytes that are read once.
__device__ inline uint4 load_once(const void* from, bool there) {
    uint4 v{0, 0, 0, 0};
    asm volatile(
        "{.reg .pred there; setp.ne.b32 there, %5, 0;\n"
        "@there ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<int>(there)));
    return v;
}

__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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
template <int KIND>
struct Place {
    int sum, row, output;
    bool there;

    __device__ Place(int i, const Product& p) {
        constexpr int OUTPUTS = KIND == WIDE ? 16 : 8;
        sum = KIND == WIDE ? i : i / 2 * 4 + i % 2;
        row = sum / 4 % 4 * 2 + sum % 2;
        output = blockIdx.x * OUTPUTS + sum / 16 + sum / 2 % 2 * 8;
        there = i < OUTPUTS * MOST_ROWS && row < p.rows && output < p.outputs;
    }
};

template <typename T, int KIND, bool NORM, int STEPS>
__global__ void __launch_bounds__(MOST_WARPS * 32) few_rows(const Product p) {
    constexpr int OUTPUTS = KIND == WIDE ? 16 : 8, CHUNK = 32 * STEPS;
    extern __shared__ uint4 norm[];
    __shared__ float sums_of[MOST_WARPS][32 * 4];
    __shared__ float squares_of[MOST_WARPS][MOST_ROWS];
    let_next_begin();
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * OUTPUTS + g, second = first + (KIND == GATED ? p.outputs : 8);
    const bool has_first = first < p.outputs, has_second = KIND == GATED ? has_first : second < p.outputs;
    const T* weight = static_cast<const T*>(p.weight);
    const T *row = weight + static_cast<int64_t>(first) * p.width + 8 * t,
            *second_row = weight + static_cast<int64_t>(second) * p.width + 8 * t;
    uint4 a[STEPS][2];
    auto load_weights = [&](int step, int begin) {
        const int at = begin + 32 * step;
        const bool inside = at + 8 * t < p.width;
        a[step][0] = load_once(row + at, inside && has_first);
        if (KIND != NARROW) a[step][1] = load_once(second_row + at, inside && has_second);
    };
    int begin = warp * CHUNK;
#pragma unroll
    for (int step = 0; step < STEPS; step++) load_weights(step, begin);
    if (NORM) {  // no kernel in front has written it, either
        for (int i = threadIdx.x; i < p.width / 8; i += blockDim.x) norm[i] = static_cast<const uint4*>(p.norm)[i];
        __syncthreads();
    }
    // What the end needs besides the sums, for this thread's first result (in narrow matrices its only one).
    const Place<KIND> early(threadIdx.x, p);
    const float early_bias = p.bias && early.there ? wide(static_cast<const T*>(p.bias)[early.output]) : 0;
    wait_for_previous();
    const float early_stream = p.stream && early.there ? wide(static_cast<const T*>(p.stream)[early.row * p.stream_step + early.output]) : 0;

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
            const uint4 zero{0, 0, 0, 0}, top = a[step][0], bottom = KIND == NARROW ? zero : a[step][1];
            const uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y}, high[4] = {top.z, bottom.z, top.w, bottom.w};
            labkit::mma<T>(sums, low, b[step].x, b[step].y);
            labkit::mma<T>(sums, high, b[step].z, b[step].w);
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
        const Place<KIND> place(i, p);
        if (!place.there) continue;
        float bias = early_bias, stream = early_stream;
        if (i >= blockDim.x) {
            if (p.bias) bias = wide(static_cast<const T*>(p.bias)[place.output]);
            if (p.stream) stream = wide(static_cast<const T*>(p.stream)[place.row * p.stream_step + place.output]);
        }
        float sum = 0, up = 0, square = 0;
        for (int w = 0; w < warps; w++) {
            sum += sums_of[w][place.sum];
            if (KIND == GATED) up += sums_of[w][place.sum + 2];
            if (NORM) square += squares_of[w][place.row];
        }
        if (NORM) {
            const float scale = rsqrtf(square / p.width + p.eps);
            sum *= scale, up *= scale;
        }
        T result = narrow<T>(sum + bias);
        if (KIND == GATED) {  // rounded wherever the operations one by one round
            const float gate = wide(result);
            result = narrow<T>(wide(narrow<T>(gate / (1 + __expf(-gate)))) * wide(narrow<T>(up)));
        }
        if (p.stream) result = narrow<T>(wide(result) + stream);
        static_cast<T*>(p.out)[static_cast<int64_t>(place.row) * p.outputs + place.output] = result;
    }
}

int tune(const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
}

template <typename T, int KIND, bool NORM, int STEPS>
cudaError_t launch(const Product& p, bool early, cudaStream_t stream) {
    constexpr int OUTPUTS = KIND == WIDE ? 16 : 8, CHUNK = 32 * STEPS;
    const int tiles = (p.outputs + OUTPUTS - 1) / OUTPUTS, most = (p.width + CHUNK - 1) / CHUNK;
    int warps = std::min({(tune("FILL", 4096) + tiles - 1) / tiles, most, MOST_WARPS});
    if (tune("WARPS", 0)) warps = tune("WARPS", 0);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(tiles);
    config.blockDim = dim3(32 * warps);
    config.dynamicSmemBytes = NORM ? p.width * 2 : 0;
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, few_rows<T, KIND, NORM, STEPS>, p);
}

template <typename T, int KIND, bool NORM>
cudaError_t launch(const Product& p, bool early, cudaStream_t stream) {
    return tune("STEPS", 8) == 4 ? launch<T, KIND, NORM, 4>(p, early, stream) : launch<T, KIND, NORM, 8>(p, early, stream);
}

template <typename T>
cudaError_t launch(const Product& p, bool gated, bool early, cudaStream_t stream) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (p.norm) {
            if (gated) return launch<T, GATED, true>(p, early, stream);
            return p.outputs <= tune("NARROW", 1024) ? launch<T, NARROW, true>(p, early, stream) : launch<T, WIDE, true>(p, early, stream);
        }
    }
    if (p.norm) return cudaErrorInvalidValue;
    if (gated) return launch<T, GATED, false>(p, early, stream);
    return p.outputs <= tune("NARROW", 1024) ? launch<T, NARROW, false>(p, early, stream) : launch<T, WIDE, false>(p, early, stream);
}

}  // namespace

// Shapes as in Product, whose fields these are; steps in numbers, width a multiple of 8, all addresses and steps of x
// multiples of 16 bytes. early: begin before the kernel in front has ended. Returns a cudaError_t.
extern "C" int labkit_few_rows(const void* x, const void* norm, const void* weight, const void* bias, const void* residual,
                               void* out, int64_t x_step, int64_t residual_step,
                               int64_t rows, int64_t width, int64_t outputs, float eps, int64_t gated, int64_t bfloat16,
                               int64_t early, void* stream) {
    Product p{x, norm, weight, bias, residual, out};
    p.x_step = x_step, p.stream_step = residual_step, p.eps = eps;
    p.rows = static_cast<int>(rows), p.width = static_cast<int>(width), p.outputs = static_cast<int>(outputs);
    const auto s = static_cast<cudaStream_t>(stream);
    return bfloat16 ? launch<__nv_bfloat16>(p, gated, early, s) : launch<__half>(p, gated, early, s);
}
