// The middle of a layer for a few decodes: QK-norm, RoPE, the new key and value into their block, attention.
//
// What it computes is labkit/kernels/qkv_rope.py's and decode_attention.py's, which describe it. A few sequences have
// little to read, so that most of the time of two kernels is beginning, waiting and ending. This one reads the keys
// and values of earlier steps while the kernel in front, the QKV product, still runs.
//
// A cluster of C blocks takes one sequence and one key/value head with the G query heads that share it. Its 4C warps
// take TOKENS tokens of the context each, in turn; every warp has what it needs in its own part of shared memory, and
// a softmax of its own:
//
//     context   │ warp 0 of block 0 │ warp 0 of block 1 │ … │ warp 3 of block C-1 │ warp 0 of block 0 │ …
//
// The new token is one of these: whose turn it is puts its key and value where the copies have left zeros. In the end
// block c owns D/C columns of the result. Every warp writes its share of them into that block's shared memory, and
// after one meeting of the cluster each block adds up what it has got.
//
// Scores and values are products of 16 rows on tensor cores, of which G are in use.
//
// Letters: S sequences, H query heads, K key/value heads, G = H/K, D head size, B block size (of the cache), N blocks.

#include <algorithm>
#include <cmath>

#include "gpu.cuh"
#include "tensor_cores.cuh"

namespace {

using namespace labkit;

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int TOKENS = 16;  // of a warp's turn
constexpr int STAGES = 2;   // turns that are on their way
constexpr int LANES = 4;    // that add up one number of the result
constexpr int HEADS = 3;    // of a warp: 8 of queries and a key among 4 warps

struct Decodes {
    const void *qkv, *q_norm, *k_norm;  // [S, (H + 2K) D], [D] twice or null: no norm
    const float* cos_sin;               // [positions, D]
    const int* positions;               // [S]
    const int64_t* slots;               // [S], in tokens from the pool's start
    const int *tables, *lens;           // [S, W], [S], the new token included; 0: gives zeros, and is not stored
    void *k, *v;                        // [N, B, K, D], in the same order
    void* out;                          // [S, H, D]
    // Steps between neighbours of a dimension, in numbers.
    int64_t qkv_row, table_row, cache_block, cache_token, cache_head;
    int kv_heads, group, block_size, window;  // window 0: none
    float eps, scale;                         // log2(e) / √D
};

// A block's shared memory.
template <typename T, int D>
struct Memory {
    static constexpr int PIECES = D / 8, TILE = TOKENS * D * 2, STAGE = 2 * TILE, PADDED = D + 8;

    uint32_t turns;  // [WARPS, STAGES] keys and values [TOKENS, D] as tensor_cores.cuh has tiles
    T* fresh;        // [2, D], the new key and value
    T* query;        // [G, PADDED]: rows in different memory banks
    float2* known;   // [4C, G] a warp's best score and its total of weights
    float* parts;    // [4C, part], of each the sums [G, D/C], and some room
    int part;        // their step: LANES neighbours in different memory banks

    __device__ Memory(unsigned char* begin, int group, int blocks) : turns(shared_address(begin)) {
        fresh = reinterpret_cast<T*>(begin + WARPS * STAGES * STAGE);
        query = fresh + 2 * D;
        known = reinterpret_cast<float2*>(query + group * PADDED);
        parts = reinterpret_cast<float*>(known + WARPS * blocks * group);
        part = group * (D / blocks) + 8;
    }

    static int bytes(int group, int blocks) {
        const int part = group * (D / blocks) + 8;
        return WARPS * STAGES * STAGE + (2 * D + group * PADDED) * 2 + WARPS * blocks * (group * 8 + part * 4);
    }
};

// 16 bytes from global to shared memory, or zeros.
__device__ inline void copy_or_zero(uint32_t to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ inline void store_shared(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A head [D], of which each lane of a warp has D/64 numbers of either half.
template <typename T, int D>
struct Head {
    static constexpr int PAIRS = D / 64;
    Vector<T, PAIRS> low, high;

    __device__ void load(const T* from) {
        low = reinterpret_cast<const Vector<T, PAIRS>*>(from)[threadIdx.x % 32];
        high = reinterpret_cast<const Vector<T, PAIRS>*>(from + D / 2)[threadIdx.x % 32];
    }

    __device__ void store(T* to) const {
        reinterpret_cast<Vector<T, PAIRS>*>(to)[threadIdx.x % 32] = low;
        reinterpret_cast<Vector<T, PAIRS>*>(to + D / 2)[threadIdx.x % 32] = high;
    }

    // RMSNorm, rounded after each step, as the definition does it.
    __device__ void normalise(const Head& weight, float eps) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) squares += wide(low.at[i]) * wide(low.at[i]) + wide(high.at[i]) * wide(high.at[i]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        const float by = 1 / sqrtf(squares / D + eps);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            low.at[i] = narrow<T>(wide(narrow<T>(wide(low.at[i]) * by)) * wide(weight.low.at[i]));
            high.at[i] = narrow<T>(wide(narrow<T>(wide(high.at[i]) * by)) * wide(weight.high.at[i]));
        }
    }

    __device__ void turn(const Head<float, D>& cos_sin) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float a = wide(low.at[i]), b = wide(high.at[i]), cos = cos_sin.low.at[i], sin = cos_sin.high.at[i];
            low.at[i] = narrow<T>(a * cos - b * sin);
            high.at[i] = narrow<T>(b * cos + a * sin);
        }
    }
};

// A warp's tokens of the context, in its stages of shared memory.
template <typename T, int D>
struct Turns {
    static constexpr int PIECES = Memory<T, D>::PIECES, TILE = Memory<T, D>::TILE;

    const T *keys, *values;  // of this head
    const int* table;        // block table of the sequence
    const Decodes& p;
    int last;          // the new token's position
    uint32_t stages;   // where they begin

    __device__ uint32_t at(int stage) const { return stages + stage * Memory<T, D>::STAGE; }

    // Starts to copy tokens first … first + TOKENS - 1 as far as they are older than the new one. The rest is zeros.
    __device__ void fill(int stage, int first) const {
        const int lane = threadIdx.x % 32, token = first + lane % TOKENS;
        int64_t mine = -1;  // where token `token` lies
        if (token < last)
            mine = table[token / p.block_size] * p.cache_block + token % p.block_size * p.cache_token;
#pragma unroll
        for (int i = 0; i < PIECES / 2; i++) {
            const int row = i * (32 / PIECES) + lane / PIECES, piece = lane % PIECES;
            const int64_t from = __shfl_sync(~0u, mine, row);
            const int64_t begin = (from < 0 ? 0 : from) + 8 * piece;
            const uint32_t to = at(stage) + place<TOKENS>(row, piece);
            copy_or_zero(to, keys + begin, from >= 0);
            copy_or_zero(to + TILE, values + begin, from >= 0);
        }
        close_copies();
    }
};

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) few_decodes(const Decodes p) {
    constexpr int TILE = Memory<T, D>::TILE, PIECES = Memory<T, D>::PIECES;
    extern __shared__ __align__(1024) unsigned char shared[];
    let_next_begin();
    const int rank = blockIdx.x, blocks = gridDim.x, kv_head = blockIdx.y, sequence = blockIdx.z, group = p.group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Memory<T, D> memory(shared, group, blocks);

    // Nobody who may still be running writes what is read here, but steps that are over.
    const int context = p.lens[sequence], last = context - 1;
    const int lowest = p.window ? max(context - p.window, 0) : 0, step = TOKENS * WARPS * blocks;
    const int64_t of_head = kv_head * p.cache_head;
    const Turns<T, D> turns{static_cast<const T*>(p.k) + of_head, static_cast<const T*>(p.v) + of_head,
                            p.tables + sequence * p.table_row, p, last, memory.turns + warp * STAGES * 2 * TILE};
    int first = lowest + TOKENS * (warp * blocks + rank);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        if (first + stage * step < context) turns.fill(stage, first + stage * step);
        else close_copies();
    }
    const bool has_last = context > 0 && (last - lowest) / TOKENS % blocks == rank;
    const int64_t slot = p.slots[sequence];
    const int64_t cached = slot / p.block_size * p.cache_block + slot % p.block_size * p.cache_token + of_head;
    Head<float, D> cos_sin;
    cos_sin.load(p.cos_sin + static_cast<int64_t>(p.positions[sequence]) * D);
    Head<T, D> q_norm{}, k_norm{};
    if (p.q_norm) q_norm.load(static_cast<const T*>(p.q_norm)), k_norm.load(static_cast<const T*>(p.k_norm));
    arrive_in_cluster();
    wait_for_previous();

    // Each block for itself: its query heads, and if the new token is one of its own, that one's key and value.
    const T* row = static_cast<const T*>(p.qkv) + sequence * p.qkv_row;
    const T* new_key = row + (p.kv_heads * group + kv_head) * D;
    Head<T, D> heads[HEADS];
    uint4 new_value{};
#pragma unroll
    for (int i = 0; i < HEADS; i++) {  // all loads first
        const int head = warp + i * WARPS;
        if (head < group) heads[i].load(row + (kv_head * group + head) * D);
        if (has_last && head == group) heads[i].load(new_key);
    }
    const bool has_value = has_last && warp == WARPS - 1 && lane < PIECES;
    if (has_value) new_value = reinterpret_cast<const uint4*>(new_key + p.kv_heads * D)[lane];
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        const int head = warp + i * WARPS;
        if (head > group) break;
        if (p.q_norm && head < group) heads[i].normalise(q_norm, p.eps);
        if (p.q_norm && head == group) heads[i].normalise(k_norm, p.eps);
        heads[i].turn(cos_sin);
        if (head < group) heads[i].store(memory.query + head * Memory<T, D>::PADDED);
        else if (has_last) heads[i].store(memory.fresh), heads[i].store(static_cast<T*>(p.k) + cached);
    }
    if (has_value) {
        reinterpret_cast<uint4*>(memory.fresh + D)[lane] = new_value;
        reinterpret_cast<uint4*>(static_cast<T*>(p.v) + cached)[lane] = new_value;
    }
    __syncthreads();

    uint32_t query[D / 16][2];
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        const T* from = memory.query + g * Memory<T, D>::PADDED + 8 * i + 2 * t;
        query[i / 2][i % 2] = g < group ? *reinterpret_cast<const uint32_t*>(from) : 0;
    }
    float best = -INFINITY, total = 0, sums[D / 8][4] = {};
    for (int stage = 0; first < context; first += step, stage = (stage + 1) % STAGES) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        const uint32_t keys = turns.at(stage), values = keys + TILE;
        if (last - first < TOKENS) {  // it is the new token's turn
            for (int i = lane; i < 2 * PIECES; i += 32) {
                const uint4 part = reinterpret_cast<const uint4*>(memory.fresh)[i];
                store_shared(keys + i / PIECES * TILE + place<TOKENS>(last - first, i % PIECES), part);
            }
            __syncwarp();
        }
        float scores[2][2][4] = {};  // of two halves of D, for 8 tokens and 8 more
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t b[4];
            load_matrices<false>(b, keys + place<TOKENS>(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
            const uint32_t a[4] = {query[k][0], 0, query[k][1], 0};
            mma<T>(scores[k % 2][0], a, b[0], b[1]);
            mma<T>(scores[k % 2][1], a, b[2], b[3]);
        }
        float weights[4], highest = best;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = first + i / 2 * 8 + 2 * t + i % 2;
            weights[i] = token < context ? (scores[0][i / 2][i % 2] + scores[1][i / 2][i % 2]) * p.scale : -INFINITY;
            highest = fmaxf(highest, weights[i]);
        }
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));  // finite: the first token is inside
        const float shrink = power_of_two(best - highest);
        best = highest, total *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) total += weights[i] = power_of_two(weights[i] - best);
        const uint32_t a[4] = {pack<T>(weights[0], weights[1]), 0, pack<T>(weights[2], weights[3]), 0};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_matrices<true>(b, values + place<TOKENS>(lane / 8 % 2 * 8 + lane % 8, 2 * n + lane / 16));
            sums[2 * n][0] *= shrink, sums[2 * n][1] *= shrink, sums[2 * n + 1][0] *= shrink, sums[2 * n + 1][1] *= shrink;
            mma<T>(sums[2 * n], a, b[0], b[1]);
            mma<T>(sums[2 * n + 1], a, b[2], b[3]);
        }
        __syncwarp();
        if (first + STAGES * step < context) turns.fill(stage, first + STAGES * step);
        else close_copies();
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);

    const int mine = warp * blocks + rank, columns = D / blocks;
    wait_for_cluster();  // all of its blocks have begun
    if (g < group) {
        for (int block = t; block < blocks; block += 4)
            store_in_block(shared_address(memory.known + mine * group + g), block, float2{best, total});
        if (total > 0) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const int d = 8 * n + 2 * t;
                const uint32_t to = shared_address(memory.parts + mine * memory.part + g * columns + d % columns);
                store_in_block(to, d / columns, float2{sums[n][0], sums[n][1]});
            }
        }
    }
    arrive_in_cluster();
    wait_for_cluster();

    for (int begin = 0; begin < group * columns; begin += THREADS / LANES) {
        const int number = begin + threadIdx.x / LANES, head = number / columns;
        const bool there = number < group * columns;
        float most = -1e30f, weight = 0, sum = 0;
        for (int i = threadIdx.x % LANES; there && i < WARPS * blocks; i += LANES) {
            const float2 known = memory.known[i * group + head];
            if (known.y == 0) continue;  // this warp had no token
            const float higher = fmaxf(most, known.x), by = power_of_two(known.x - higher);
            const float shrink = power_of_two(most - higher);
            weight = weight * shrink + known.y * by;
            sum = sum * shrink + memory.parts[i * memory.part + number] * by;
            most = higher;
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const float other = __shfl_xor_sync(~0u, most, step), higher = fmaxf(most, other);
            const float by = power_of_two(most - higher), by_other = power_of_two(other - higher);
            weight = weight * by + __shfl_xor_sync(~0u, weight, step) * by_other;
            sum = sum * by + __shfl_xor_sync(~0u, sum, step) * by_other;
            most = higher;
        }
        const int64_t heads = static_cast<int64_t>(p.kv_heads) * group;
        const int64_t to = (sequence * heads + kv_head * group + head) * D + rank * columns + number % columns;
        if (there && threadIdx.x % LANES == 0) static_cast<T*>(p.out)[to] = narrow<T>(weight > 0 ? sum / weight : 0);
    }
}

template <typename T, int D>
cudaError_t launch(const Decodes& p, int sequences, int blocks, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks, p.kv_heads, sequences);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = Memory<T, D>::bytes(p.group, blocks);
    config.stream = stream;
    const auto kernel = few_decodes<T, D>;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(config.dynamicSmemBytes));
    if (error == cudaSuccess && blocks > 8)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = blocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

// Shapes and steps as in Decodes, whose fields these are: pointers qkv … out, steps, then sizes. blocks: C, a power of
// two, at most 16. For head sizes of 64 and 128, groups of at most 8 heads, and what is read 16 bytes at once at
// multiples of 16 bytes. Returns a cudaError_t.
extern "C" int labkit_few_decodes(const void* qkv, const void* q_norm, const void* k_norm, const float* cos_sin,
                                  const int* positions, const int64_t* slots, const int* tables, const int* lens,
                                  void* k, void* v, void* out, const int64_t* steps, int64_t sequences,
                                  int64_t kv_heads, int64_t group, int64_t head_dim, int64_t block_size, int64_t window,
                                  float eps, int64_t blocks, int64_t bfloat16, void* stream) {
    Decodes p{qkv, q_norm, k_norm, cos_sin, positions, slots, tables, lens, k, v, out};
    p.qkv_row = steps[0], p.table_row = steps[1];
    p.cache_block = steps[2], p.cache_token = steps[3], p.cache_head = steps[4];
    p.kv_heads = static_cast<int>(kv_heads), p.group = static_cast<int>(group);
    p.block_size = static_cast<int>(block_size), p.window = static_cast<int>(window), p.eps = eps;
    p.scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
    const int s = static_cast<int>(sequences), c = static_cast<int>(blocks);
    const auto on = static_cast<cudaStream_t>(stream);
    if (head_dim == 64)
        return bfloat16 ? launch<__nv_bfloat16, 64>(p, s, c, on) : launch<__half, 64>(p, s, c, on);
    if (head_dim == 128)
        return bfloat16 ? launch<__nv_bfloat16, 128>(p, s, c, on) : launch<__half, 128>(p, s, c, on);
    return cudaErrorInvalidValue;
}
