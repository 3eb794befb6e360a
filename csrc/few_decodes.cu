// The middle of a layer for a few decodes: QK-norm, RoPE, the new key and value into their block, attention.
//
// What it computes is labkit/kernels/qkv_rope.py's and decode_attention.py's, which describe it. A few sequences have
// little to read, so that most of the time of two kernels is beginning, waiting and ending. This one reads the keys
// and values of earlier steps while the kernel in front, the QKV product, still runs.
//
// A cluster of C blocks takes one sequence and one key/value head with the G query heads that share it. Its 4C warps
// take TOKENS tokens of the context each, in turn; every warp has a softmax of its own:
//
//     context   │ warp 0 of block 0 │ warp 0 of block 1 │ … │ warp 3 of block C-1 │ warp 0 of block 0 │ …
//
// The new token is one of these: whose turn it is puts its key and value where the loads have left zeros. In the end
// block c owns D/C columns of the result. Every warp writes its share of them into that block's shared memory, and
// after one meeting of the cluster each block adds up what it has got.
//
// Tensor cores multiply 16 × 16 by 16 × 8 numbers. The 8 are query heads, of which G are in use; the 16 are tokens for
// the scores, columns of D for the result. Keys and values are loaded straight into the registers where they are
// multiplied, with no shared memory between. Lane (g, t) = (l / 4, l % 4) has, 8 numbers at a time:
//
//     keys      of tokens g and g + 8: 8t … 8t + 7 of every 32 columns, as csrc/few_rows.cu has weights
//     values    of tokens 2t, 2t + 1, 2t + 8 and 2t + 9: 8g … 8g + 7 of every 64 columns. mma wants two tokens in a
//               register; number 2m of the eight becomes row g of product m, number 2m + 1 row g + 8
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
    static constexpr int PADDED = D + 32;

    T* fresh;       // [2, D], the new key and value
    T* query;       // [G, PADDED]: neighbours in different memory banks
    float2* known;  // [4C, G] a warp's best score and its total of weights
    float* parts;   // [4C, part], of each the sums [G, D/C], and some room
    int part;       // their step: LANES neighbours in different memory banks

    __device__ Memory(unsigned char* begin, int group, int blocks) {
        fresh = reinterpret_cast<T*>(begin);
        query = fresh + 2 * D;
        parts = reinterpret_cast<float*>(query + group * PADDED);
        part = group * (D / blocks) + 8;
        known = reinterpret_cast<float2*>(parts + WARPS * blocks * part);
    }

    static int bytes(int group, int blocks) {
        return (2 * D + group * PADDED) * 2 + WARPS * blocks * ((group * (D / blocks) + 8) * 4 + group * 8);
    }
};

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

__device__ inline uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A warp's turn: 16 tokens of the context, each lane's part of them. What is not older than the new token is zeros.
template <typename T, int D>
struct Turn {
    uint4 keys[D / 32][2];    // of tokens g and g + 8
    uint4 values[4][D / 64];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9

    // Loads. mine: where token l % 16 of the turn begins in the pool, or -1
    __device__ void load_keys(const T* from, int64_t mine) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t begin = __shfl_sync(~0u, mine, g + 8 * half);
#pragma unroll
            for (int i = 0; i < D / 32; i++) keys[i][half] = load_once(from + begin + 32 * i + 8 * t, begin >= 0);
        }
    }

    __device__ void load_values(const T* from, int64_t mine) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t begin = __shfl_sync(~0u, mine, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
            for (int j = 0; j < D / 64; j++) values[i][j] = load_once(from + begin + 64 * j + 8 * g, begin >= 0);
        }
    }

    // Numbers 2 (i % 4) and 2 (i % 4) + 1 of every value's eight, two tokens side by side.
    __device__ void value_rows(uint32_t (&rows)[4], int i) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t a = word(values[2 * half][i / 4], i % 4), b = word(values[2 * half + 1][i / 4], i % 4);
            rows[2 * half] = __byte_perm(a, b, 0x5410), rows[2 * half + 1] = __byte_perm(a, b, 0x7632);
        }
    }

    // The new token is number `token` of the turn; its key and value are in shared memory.
    __device__ void insert(const T* fresh, int token) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const uint4 *key = reinterpret_cast<const uint4*>(fresh), *value = key + D / 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (token != g + 8 * half) continue;
#pragma unroll
            for (int i = 0; i < D / 32; i++) keys[i][half] = key[4 * i + t];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (token != 2 * t + i % 2 + i / 2 * 8) continue;
#pragma unroll
            for (int j = 0; j < D / 64; j++) values[i][j] = value[8 * j + g];
        }
    }
};

// The most (or the sum) over the lanes that have the same two heads.
template <bool MOST>
__device__ inline float over_tokens(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_xor_sync(~0u, x, step);
        x = MOST ? fmaxf(x, other) : x + other;
    }
    return x;
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS) few_decodes(const Decodes p) {
    extern __shared__ __align__(16) unsigned char shared[];
    let_next_begin();
    const int rank = blockIdx.x, blocks = gridDim.x, kv_head = blockIdx.y, sequence = blockIdx.z, group = p.group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Memory<T, D> memory(shared, group, blocks);

    // Nobody who may still be running writes what is read here, but steps that are over.
    const int context = p.lens[sequence], last = context - 1;
    const int lowest = p.window ? max(context - p.window, 0) : 0, step = TOKENS * WARPS * blocks;
    const int64_t of_head = kv_head * p.cache_head;
    const T *keys = static_cast<const T*>(p.k) + of_head, *values = static_cast<const T*>(p.v) + of_head;
    const int* table = p.tables + sequence * p.table_row;
    auto where = [&](int first) -> int64_t {
        const int token = first + lane % TOKENS;
        if (token >= last) return -1;
        return table[token / p.block_size] * p.cache_block + token % p.block_size * p.cache_token;
    };
    int first = lowest + TOKENS * (warp * blocks + rank);
    int64_t mine = where(first);
    Turn<T, D> turn;
    turn.load_keys(keys, mine);
    turn.load_values(values, mine);
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
    const bool has_value = has_last && warp == WARPS - 1 && lane < D / 8;
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

    uint4 query[D / 32];  // of head g, in the order of the keys
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        query[i] = uint4{0, 0, 0, 0};
        if (g < group) query[i] = reinterpret_cast<const uint4*>(memory.query + g * Memory<T, D>::PADDED)[4 * i + t];
    }
    // Of heads 2t and 2t + 1: best score, total of weights, and of the result 8 columns of every 64.
    float best[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0}, sums[D / 16][4] = {};
    for (; first < context; first += step) {
        if (last - first < TOKENS) turn.insert(memory.fresh, last - first);
        mine = where(first + step);
        float scores[2][4] = {};  // two sums each, of tokens g (0 and 1) and g + 8 (2 and 3), for both heads
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint4 top = turn.keys[i][0], bottom = turn.keys[i][1];
            mma<T>(scores[0], {top.x, bottom.x, top.y, bottom.y}, query[i].x, query[i].y);
            mma<T>(scores[1], {top.z, bottom.z, top.w, bottom.w}, query[i].z, query[i].w);
        }
        turn.load_keys(keys, mine);
        float weights[4], shrink[2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[i] = first + g + i / 2 * 8 < context ? (scores[0][i] + scores[1][i]) * p.scale : -INFINITY;
#pragma unroll
        for (int head = 0; head < 2; head++) {
            const float highest = fmaxf(best[head], over_tokens<true>(fmaxf(weights[head], weights[head + 2])));
            shrink[head] = power_of_two(best[head] - highest);  // the first token is inside, so highest is finite
            best[head] = highest;
            weights[head] = power_of_two(weights[head] - highest);
            weights[head + 2] = power_of_two(weights[head + 2] - highest);
            total[head] = total[head] * shrink[head] + weights[head] + weights[head + 2];
        }
        const uint32_t early = transposed(pack<T>(weights[0], weights[1]));
        const uint32_t late = transposed(pack<T>(weights[2], weights[3]));
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] *= shrink[j % 2];
            uint32_t v[4];
            turn.value_rows(v, i);
            mma<T>(sums[i], v, early, late);
        }
        turn.load_values(values, mine);
    }
#pragma unroll
    for (int head = 0; head < 2; head++) total[head] = over_tokens<false>(total[head]);

    const int number_of_warp = warp * blocks + rank, columns = D / blocks;
    wait_for_cluster();  // all of its blocks have begun
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int head = 2 * t + i;
        if (head >= group) continue;
        const uint32_t known = shared_address(memory.known + number_of_warp * group + head);
        for (int block = g; block < blocks; block += 8) store_in_block(known, block, float2{best[i], total[i]});
        if (total[i] == 0) continue;
#pragma unroll
        for (int j = 0; j < D / 32; j++) {  // four columns that lie side by side
            const int d = j / 2 * 64 + 8 * g + j % 2 * 4;
            const float* to = memory.parts + number_of_warp * memory.part + head * columns + d % columns;
            store_in_block(shared_address(to), d / columns,
                           float4{sums[2 * j][i], sums[2 * j][i + 2], sums[2 * j + 1][i], sums[2 * j + 1][i + 2]});
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
    if (blocks > 8) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
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
