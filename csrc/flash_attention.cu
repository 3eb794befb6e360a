// Attention of prompts over paged keys and values: FlashAttention's forward pass (Dao et al. 2022, arXiv:2205.14135;
// Shah et al. 2024, arXiv:2407.08608), causal, with grouped query heads and a sliding window.
//
// What it computes is labkit/kernels/prefill_attention.py's, which describes chunks and tiles. A block takes one tile and
// one key/value head: ROWS rows of tokens × the G query heads that share it, 16 rows a warp. It walks over the keys, KEYS
// at a time:
//
//     S = Q Kᵀ        weights = 2^(S · scale - best so far)        O = O · shrink + weights V
//
// Tensor cores and exponentials work at the same time: the products of tile t's scores and of tile t - 1's values start
// together, and the softmax of the scores runs while the values are still being multiplied. So keys and values arrive in
// pairs that are one tile apart, in a ring of shared memory:
//
//     stage 0: K0 ·    stage 1: K1 V0    stage 2: K2 V1    stage 0: K3 V2 …    last: · Vn
//
// Letters: T tokens, H query heads, K key/value heads, G = H/K, D head size, B block size (of the cache), N blocks.

#include <cmath>

#include "tensor_cores.cuh"

namespace {

using namespace labkit;

constexpr int ROWS = 128, WARPS = ROWS / 16, THREADS = 32 * WARPS;
constexpr int KEYS = 64;    // of a tile
constexpr int STAGES = 3;   // of the ring

struct Problem {
    const void *q, *k, *v;  // [T, H, D], [N, B, K, D] twice
    void* out;              // [T, H, D]
    const int *tables, *first_rows, *context_lens, *tiles;  // [C, W], [C + 1], [C], [2, num_tiles]
    // Steps between neighbours of a dimension, in numbers; 64 bits, because a pool may hold more than 2³¹.
    int64_t q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, out_token, out_head;
    int num_tiles, group, block_size, window;  // window 0: none
    uint32_t block_inverse;                    // ceil(2³² / block_size)
    float scale;                               // log2(e) / √D
};

// Copies tiles of keys and values [KEYS, D] from their blocks into the ring. A thread copies the same 16 bytes of some rows.
template <typename T, int D>
struct Ring {
    static constexpr int PIECES = D / 8, AT_ONCE = THREADS / PIECES, PASSES = KEYS / AT_ONCE;
    static constexpr uint32_t TILE_BYTES = KEYS * D * 2, STAGE_BYTES = 2 * TILE_BYTES, BYTES = STAGES * STAGE_BYTES;

    const Problem& p;
    const T *k, *v;    // of this head, at this thread's piece
    const int* table;  // block table of the sequence
    const int begin, end, high;  // tiles, and the first key that is not wanted
    const uint32_t memory;
    int next[PASSES], previous[PASSES];  // blocks of the tile whose keys, and of that whose values, come next; -1: none
    uint32_t filled = 0, used = 0;       // the stage that is filled next, and used next

    __device__ int token(int tile, int pass) const { return tile * KEYS + pass * AT_ONCE + threadIdx.x / PIECES; }

    // The blocks are looked up a tile ahead: their numbers are there when they are needed.
    __device__ void look_up(int tile) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            previous[i] = next[i];
            const int t = token(tile, i);
            next[i] = t < high ? table[__umulhi(t, p.block_inverse)] : -1;
        }
    }

    __device__ void copy(const T* cache, int64_t block_step, int64_t token_step, const int (&blocks)[PASSES], int tile,
                         uint32_t to) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int t = token(tile, i), slot = t - __umulhi(t, p.block_inverse) * p.block_size;
            const bool there = blocks[i] >= 0;
            const T* from = there ? cache + blocks[i] * block_step + slot * token_step : cache;
            copy_async(to + place<KEYS>(t - tile * KEYS, threadIdx.x % PIECES), from, there);
        }
    }

    // Starts to copy the keys of a tile and the values of the one before.
    __device__ void fill(int tile) {
        const uint32_t to = memory + filled * STAGE_BYTES;
        if (tile < end) copy(k, p.k_block, p.k_token, next, tile, to);
        if (begin < tile && tile <= end) copy(v, p.v_block, p.v_token, previous, tile - 1, to + TILE_BYTES);
        close_copies();
        look_up(tile + 1);
        filled = filled + 1 == STAGES ? 0 : filled + 1;
    }

    // Waits for the stage of a tile, and returns where it lies.
    __device__ uint32_t take(int tile) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // everybody's copies are there, and nobody uses the stage of the tile before any more
        fill(tile + STAGES - 1);
        const uint32_t stage = memory + used * STAGE_BYTES;
        used = used + 1 == STAGES ? 0 : used + 1;
        return stage;
    }
};

// 2^x, to 2 bits of the last place; what is too small is 0
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Scores of one tile become weights; `best` [2 rows] and this lane's share of the `total` of weights go on.
// shrink: what earlier weights are to be multiplied by.
__device__ inline void softmax(float (&s)[KEYS / 2], float scale, float (&best)[2], float (&total)[2],
                               float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));  // four lanes share a row
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // The floor keeps -inf - -inf, which is no number, from rows that have seen nothing yet.
        const float higher = fmaxf(fmaxf(best[half], most * scale), -1e30f);
        shrink[half] = power_of_two(best[half] - higher);
        best[half] = higher;
        float sum = 0;
#pragma unroll
        for (int i = 2 * half; i < KEYS / 2; i += 4) {
            s[i] = power_of_two(fmaf(s[i], scale, -higher));
            s[i + 1] = power_of_two(fmaf(s[i + 1], scale, -higher));
            sum += s[i] + s[i + 1];
        }
        total[half] = fmaf(total[half], shrink[half], sum);
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(THREADS, 1) flash_attention(const Problem p) {
    extern __shared__ unsigned char shared[];
    const int chunk = p.tiles[blockIdx.y];
    if (chunk < 0) return;
    const int first = p.tiles[p.num_tiles + blockIdx.y];  // token within the chunk
    const int first_row = p.first_rows[chunk], length = p.first_rows[chunk + 1] - first_row;
    const int context = p.context_lens[chunk], kv_head = blockIdx.x, tokens = ROWS / p.group;
    const int lowest = context - length + first;         // position of the tile's first token
    const int high = min(lowest + tokens, context);      // one behind its last
    const int begin = p.window ? max(lowest - p.window + 1, 0) / KEYS : 0, end = (high + KEYS - 1) / KEYS;

    using Tiles = Ring<T, D>;
    const int piece = threadIdx.x % Tiles::PIECES * 8;
    Tiles ring{p,
               static_cast<const T*>(p.k) + kv_head * p.k_head + piece,
               static_cast<const T*>(p.v) + kv_head * p.v_head + piece,
               p.tables + chunk * p.table_row,
               begin,
               end,
               high,
               (shared_address(shared) + 1023) & ~1023u};  // the permutation repeats every 1024 bytes
    ring.look_up(begin);
    for (int i = 0; i < STAGES - 1; i++) ring.fill(begin + i);

    // This lane's two rows, and its share of their queries.
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    int position[2], oldest[2];
    int64_t token[2];
    int head[2];
    bool wanted[2];
    uint32_t query[D / 16][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * half, t = first + row / p.group;
        position[half] = context - length + t;
        oldest[half] = p.window ? position[half] - p.window : -1;  // the newest key that is too old
        token[half] = first_row + t;
        head[half] = kv_head * p.group + row % p.group;
        wanted[half] = row < tokens * p.group && t < length;
        const T* from = static_cast<const T*>(p.q) + token[half] * p.q_token + head[half] * p.q_head + column;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            query[i / 2][half + i % 2 * 2] = wanted[half] ? *reinterpret_cast<const uint32_t*>(from + 8 * i) : 0;
    }

    float scores[KEYS / 2], out[D / 2] = {}, total[2] = {}, best[2] = {-INFINITY, -INFINITY}, shrink[2];
    uint32_t weights[KEYS / 16][4];
    auto weigh = [&](int tile) {  // scores of a tile into weights
        const int start = tile * KEYS;
        if (start + KEYS > lowest + 1 || (p.window && start < high - p.window)) {  // some row does not see some key
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const int key = start + i / 4 * 8 + column + i % 2, half = i / 2 % 2;
                if (key > position[half] || key <= oldest[half]) scores[i] = -INFINITY;
            }
        }
        softmax(scores, p.scale, best, total, shrink);
    };
    auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    };

    multiply<T, false, false>(scores, query, ring.take(begin));
    wait_for_products<0>(scores);
    weigh(begin);
    round_weights();
    for (int tile = begin + 1; tile < end; tile++) {
        const uint32_t stage = ring.take(tile);
        multiply<T, false, false>(scores, query, stage);
        multiply<T, true, true>(out, weights, stage + Tiles::TILE_BYTES);
        wait_for_products<1>(scores);
        weigh(tile);
        wait_for_products<0>(out);
#pragma unroll
        for (int i = 0; i < D / 2; i++) out[i] *= shrink[i / 2 % 2];
        round_weights();
    }
    multiply<T, true, true>(out, weights, ring.take(end) + Tiles::TILE_BYTES);
    wait_for_products<0>(out);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        const float inverse = total[half] > 0 ? 1 / total[half] : 0;
        T* to = static_cast<T*>(p.out) + token[half] * p.out_token + head[half] * p.out_head + column;
        if (wanted[half]) {
#pragma unroll
            for (int i = 2 * half; i < D / 2; i += 4)
                *reinterpret_cast<uint32_t*>(to + i / 4 * 8) = pack<T>(out[i] * inverse, out[i + 1] * inverse);
        }
    }
}

template <typename T, int D>
int launch(const Problem& p, int64_t kv_heads, cudaStream_t stream) {
    constexpr int BYTES = Ring<T, D>::BYTES + 1024;  // to begin at a multiple of 1024
    cudaError_t error = cudaFuncSetAttribute(flash_attention<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(kv_heads), p.num_tiles);
    flash_attention<T, D><<<grid, THREADS, BYTES, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace

// Shapes and steps as in Problem, whose fields these are. Returns a cudaError_t; cudaErrorInvalidValue for another head size.
extern "C" int labkit_flash_attention(const void* q, const void* k, const void* v, void* out, const int* tables,
                                      const int* first_rows, const int* context_lens, const int* tiles,
                                      const int64_t* steps, int64_t num_tiles, int64_t kv_heads, int64_t group,
                                      int64_t head_dim, int64_t block_size, int64_t window, int64_t bfloat16,
                                      void* stream) {
    Problem p{q, k, v, out, tables, first_rows, context_lens, tiles};
    p.q_token = steps[0], p.q_head = steps[1];
    p.k_block = steps[2], p.k_token = steps[3], p.k_head = steps[4];
    p.v_block = steps[5], p.v_token = steps[6], p.v_head = steps[7];
    p.table_row = steps[8], p.out_token = steps[9], p.out_head = steps[10];
    p.num_tiles = static_cast<int>(num_tiles), p.group = static_cast<int>(group);
    p.block_size = static_cast<int>(block_size), p.window = static_cast<int>(window);
    p.block_inverse = static_cast<uint32_t>(((uint64_t{1} << 32) + block_size - 1) / block_size);
    p.scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
    const auto s = static_cast<cudaStream_t>(stream);
    if (head_dim == 64) return bfloat16 ? launch<__nv_bfloat16, 64>(p, kv_heads, s) : launch<__half, 64>(p, kv_heads, s);
    if (head_dim == 128)
        return bfloat16 ? launch<__nv_bfloat16, 128>(p, kv_heads, s) : launch<__half, 128>(p, kv_heads, s);
    return cudaErrorInvalidValue;
}
