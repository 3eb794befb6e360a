// RMSNorm, alone and with the residual sum before it, in one pass over memory.
//
// A row belongs to `lanes` threads, a whole number of warps; narrow rows share a block. A thread keeps its part of
// the row in registers: COUNT vectors of WIDE numbers, loaded 16 bytes at once where strides and addresses allow it,
// else one by one. The sum of squares is float32.

#include <cstdint>

#include "gpu.cuh"

namespace {

using namespace labkit;

constexpr int BLOCK = 256, MOST_LANES = 512;

struct Rows {
    const void* x;        // row r is at r / heads * token_step + r % heads * head_step
    void* residual;       // [rows, width], rows residual_step apart; only with ADD
    const void* weight;   // [width]
    void* out;            // [rows, width]
    int64_t token_step, head_step, residual_step;
    uint32_t rows, heads;
    int width;
    float eps;
};

// The sum over all lanes of a row; `shared` has a place for every warp of the block.
__device__ inline float sum_of_row(float part, float* shared) {
    for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(~0u, part, step);
    if (blockDim.x == 32) return part;
    const int warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (threadIdx.x % 32 == 0) shared[first + threadIdx.x / 32] = part;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < warps; i++) total += shared[first + i];
    return total;
}

// Block (lanes, rows). Rounds where PyTorch's definition does: the stream, and the normed number before the weight.
template <typename T, int WIDE, int COUNT, bool ADD>
__global__ void __launch_bounds__(MOST_LANES) rms_norm(const Rows p) {
    using V = Vector<T, WIDE>;
    __shared__ float shared[MOST_LANES / 32];
    const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
    const int width = row < p.rows ? p.width : 0;  // nothing behind the last row
    const V* x = reinterpret_cast<const V*>(static_cast<const T*>(p.x) + row / p.heads * p.token_step +
                                            row % p.heads * p.head_step);
    V* stream = reinterpret_cast<V*>(static_cast<T*>(p.residual) + row * p.residual_step);
    V values[COUNT], added[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {  // nothing else in here, so that all loads are on their way at once
        const int at = i * blockDim.x + threadIdx.x;
        if (at * WIDE < width) {
            values[i] = x[at];
            if (ADD) added[i] = stream[at];
        }
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * blockDim.x + threadIdx.x;
        if (at * WIDE < width) {
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                if (ADD) values[i].at[j] = narrow<T>(wide(values[i].at[j]) + wide(added[i].at[j]));
                squares += wide(values[i].at[j]) * wide(values[i].at[j]);
            }
            if (ADD) stream[at] = values[i];
        }
    }
    const float scale = rsqrtf(sum_of_row(squares, shared) / p.width + p.eps);
    V* out = reinterpret_cast<V*>(static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.width);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * blockDim.x + threadIdx.x;
        if (at * WIDE < width) {
            const V weight = static_cast<const V*>(p.weight)[at];
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                const float normed = wide(narrow<T>(wide(values[i].at[j]) * scale));
                values[i].at[j] = narrow<T>(normed * wide(weight.at[j]));
            }
            out[at] = values[i];
        }
    }
}

template <typename T, int WIDE, int COUNT>
cudaError_t start(const Rows& p, cudaStream_t stream) {
    const int threads = (p.width + WIDE * COUNT - 1) / (WIDE * COUNT), lanes = (threads + 31) / 32 * 32;
    const int together = lanes < BLOCK ? BLOCK / lanes : 1;
    const unsigned blocks = (p.rows + together - 1) / together;
    if (p.residual)
        rms_norm<T, WIDE, COUNT, true><<<blocks, dim3(lanes, together), 0, stream>>>(p);
    else
        rms_norm<T, WIDE, COUNT, false><<<blocks, dim3(lanes, together), 0, stream>>>(p);
    return cudaGetLastError();
}

// As few vectors a thread as give enough threads: loads of many threads are in flight together.
template <typename T, int WIDE>
cudaError_t start(const Rows& p, cudaStream_t stream) {
    if constexpr (WIDE == 1) {
        if (p.width <= 16 * MOST_LANES) return start<T, 1, 16>(p, stream);
    } else {
        if (p.width <= BLOCK * WIDE) return start<T, WIDE, 1>(p, stream);
        if (p.width <= 2 * MOST_LANES * WIDE) return start<T, WIDE, 2>(p, stream);
        if (p.width <= 8 * MOST_LANES * WIDE) return start<T, WIDE, 8>(p, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t start(const Rows& p, cudaStream_t stream) {
    constexpr int WIDE = 16 / sizeof(T);
    const auto addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.residual) |
                           reinterpret_cast<uintptr_t>(p.weight) | reinterpret_cast<uintptr_t>(p.out);
    const bool aligned = addresses % 16 == 0 && (p.width | p.token_step | p.head_step | p.residual_step) % WIDE == 0;
    return aligned ? start<T, WIDE>(p, stream) : start<T, 1>(p, stream);
}

}  // namespace

// out = x / rms(x) * weight, row by row; with a residual (may be null), that of residual += x instead. Rows of at most
// 16384 numbers, of 8192 where they are not aligned to 16 bytes; steps in numbers; type 0: float32, 1: float16,
// 2: bfloat16. Returns a cudaError_t.
extern "C" int labkit_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                               int64_t heads, int64_t token_step, int64_t head_step, int64_t residual_step,
                               int64_t width, float eps, int64_t type, void* stream) {
    Rows p{x, residual, weight, out, token_step, head_step, residual_step};
    p.rows = static_cast<uint32_t>(rows), p.heads = static_cast<uint32_t>(heads);
    p.width = static_cast<int>(width), p.eps = eps;
    const auto s = static_cast<cudaStream_t>(stream);
    return type == 0 ? start<float>(p, s) : type == 1 ? start<__half>(p, s) : start<__nv_bfloat16>(p, s);
}
