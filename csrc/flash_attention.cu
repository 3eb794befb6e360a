// Attention of prompts over paged keys and values: FlashAttention's forward pass (Dao et al. 2022, arXiv:2205.14135;
// Shah et al. 2024, arXiv:2407.08608), causal, with grouped query heads and a sliding window.
//
// What it computes is labkit/kernels/prefill_attention.py's, which describes chunks and tiles. A block takes one tile
// and one key/value head: ROWS rows of tokens × the G query heads that share it, 16 rows a warp. It walks over the
// keys, KEYS at a time:
//
//     S = Q Kᵀ        weights = 2^(S · scale - best)        O = O · shrink + weights V
//
// Tensor cores and exponentials work at the same time: the products of tile t's scores and of tile t - 1's values
// start together, and the softmax of the scores runs while the values are still being multiplied. So keys and values
// arrive in pairs that are one tile apart, in a ring of shared memory:
//
//     stage 0: K0 ·    stage 1: K1 V0    stage 2: K2 V1    stage 0: K3 V2 …    last: · Vn
//
// Letters: T tokens, H query heads, K key/value heads, G = H/K, D head size, B block size (of the cache), N blocks.

#include <cmath>

#include "gpu.cuh"
#include "tensor_cores.cuh"

namespace {

using namespace labkit;

constexpr int ROWS = 128, WARPS = ROWS / 16, THREADS = 32 * WARPS;
constexpr int KEYS = 64;        // of a tile
constexpr int STAGES = 3;       // of the ring
constexpr float SLACK = 8;      // weights may grow to 2^SLACK before everything is scaled down; float16 holds 2^15

struct Problem {
    const void *q, *k, *v;  // [T, H, D], [N, B, K, D] twice
    void* out;              // [T, H, D]
    const int *tables, *first_rows, *context_lens, *tiles;  // [C, W], [C + 1], [C], [2, num_tiles]
    // Steps between neighbours of a dimension, in numbers; in the cache in 16 bytes, the same for keys and values.
    int64_t q_token, q_head, table_row, out_token, out_head;
    uint32_t cache_block, cache_token, cache_head;
    int num_tiles, group, block_size, window;  // window 0: none
    uint32_t block_inverse;                    // ceil(2³² / block_size)
    float scale;                               // log2(e) / √D
};

// Copies tiles of keys and values [KEYS, D] from their blocks into the ring. A thread copies the same 16 bytes of a few
// rows. A block that is not a power of two of tokens costs nothing more: positions are divided by multiplying.
template <int D>
struct Ring {
    static constexpr int PIECES = D / 8, AT_ONCE = THREADS / PIECES, PASSES = KEYS / AT_ONCE;
    static constexpr uint32_t TILE_BYTES = KEYS * D * 2, STAGE_BYTES = 2 * TILE_BYTES, BYTES = STAGES * STAGE_BYTES;

    const Problem& p;
    const uint4 *keys, *values;  // of this head, at this thread's piece
    const int* table;             // block table of the sequence
    int begin, end, last;         // tiles, and the last key
    uint32_t memory, mine;        // where the ring begins, and this thread's piece of a tile's first rows within it
    int blocks[PASSES];           // of the tile that is copied next
    uint32_t slots[PASSES];       // and where its rows lie in them, in 16 bytes
    uint32_t rows[PASSES];        // of the keys that were copied last, in 16 bytes: 32 bits reach through 64 GB
    uint32_t filled;              // the stage that is filled next; the one behind it was filled first

    __device__ Ring(const Problem& p, int chunk, int kv_head, int begin, int end, int high, uint32_t memory)
        : p(p), begin(begin), end(end), last(high - 1), memory(memory), filled(0) {
        const int piece = threadIdx.x % PIECES;
        keys = static_cast<const uint4*>(p.k) + uint64_t{p.cache_head} * kv_head + piece;
        values = static_cast<const uint4*>(p.v) + uint64_t{p.cache_head} * kv_head + piece;
        table = p.tables + chunk * p.table_row;
        mine = place<KEYS>(threadIdx.x / PIECES, piece);
        look_up(begin);
        for (int i = 0; i < STAGES - 1; i++) fill(begin + i);
    }

    // Blocks are looked up a tile ahead: their numbers are there when they are needed. Behind the last key there is the
    // last key again; nobody looks at it.
    __device__ void look_up(int tile) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const uint32_t token = min(tile * KEYS + i * AT_ONCE + static_cast<int>(threadIdx.x) / PIECES, last);
            const uint32_t block = __umulhi(token, p.block_inverse);
            blocks[i] = table[block];
            slots[i] = (token - block * p.block_size) * p.cache_token;
        }
    }

    // Starts to copy the keys of a tile and the values of the one before.
    __device__ void fill(int tile) {
        const uint32_t to = memory + filled * STAGE_BYTES + mine;
        if (begin < tile && tile <= end) {
#pragma unroll
            for (int i = 0; i < PASSES; i++) copy_async(to + TILE_BYTES + i * AT_ONCE * 128, values + rows[i]);
        }
        if (tile < end) {
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                rows[i] = blocks[i] * p.cache_block + slots[i];
                copy_async(to + i * AT_ONCE * 128, keys + rows[i]);
            }
            look_up(tile + 1);
        }
        close_copies();
        filled = following(filled);
    }

    __device__ static uint32_t following(uint32_t stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

    // Waits for the stage that was filled first, and returns where it lies. After that, nobody uses the one before it
    // any more: it can be filled.
    __device__ uint32_t take() {
        wait_for_copies<STAGES - 2>();
        show_to_products();
        __syncthreads();
        return memory + following(filled) * STAGE_BYTES;
    }
};

// What is known of two rows after some tiles. The four lanes that share a row agree on `best`, the exponent that is
// taken off its scores; each has its own part of the `total` of weights.
struct Rows {
    float best[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, shrink[2];

    // Scores of one tile become weights. Returns whether what was summed up before must be multiplied by `shrink`: best
    // moves only when weights would pass 2^SLACK, which is soon never. All rows of the warp answer together.
    __device__ bool weigh(float (&s)[KEYS / 2], float scale) {
        float most[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            most[half] = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
            for (int i = 2 * half + 4; i < KEYS / 2; i += 4) most[half] = fmaxf(most[half], fmaxf(s[i], s[i + 1]));
            most[half] *= scale;
        }
        const bool moved = __any_sync(~0u, most[0] > best[0] + SLACK || most[1] > best[1] + SLACK);
        if (moved) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float higher = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
                higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
                higher = higher > best[half] + SLACK ? higher : best[half];
                shrink[half] = power_of_two(best[half] - higher);
                total[half] *= shrink[half];
                best[half] = higher;
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            s[i] = power_of_two(fmaf(s[i], scale, -best[i / 2 % 2]));
            total[i / 2 % 2] += s[i];
        }
        return moved;
    }
};

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

    // The permutation of pieces repeats every 1024 bytes.
    Ring<D> ring(p, chunk, kv_head, begin, end, high, (shared_address(shared) + 1023) & ~1023u);

    // This lane's two rows: which of T they are (-1: none), whose head, and this lane's share of the queries.
    const int lane = threadIdx.x % 32, column = lane % 4 * 2, to_position = context - length - first_row;
    int row[2], head[2];
    uint32_t query[D / 16][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = threadIdx.x / 32 * 16 + lane / 4 + 8 * half, token = first + r / p.group;
        row[half] = r < tokens * p.group && token < length ? first_row + token : -1;
        head[half] = kv_head * p.group + r % p.group;
        const T* from = static_cast<const T*>(p.q) + row[half] * p.q_token + head[half] * p.q_head + column;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            query[i / 2][half + i % 2 * 2] = row[half] < 0 ? 0 : *reinterpret_cast<const uint32_t*>(from + 8 * i);
    }

    float scores[KEYS / 2], out[D / 2] = {};
    uint32_t weights[KEYS / 16][4];
    Rows rows;
    auto weigh = [&](int tile) {
        const int start = tile * KEYS;
        if (start + KEYS > lowest + 1 || (p.window && start < high - p.window)) {  // some row does not see some key
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const int key = start + i / 4 * 8 + column + i % 2, position = row[i / 2 % 2] + to_position;
                if (key > position || (p.window && key <= position - p.window)) scores[i] = -INFINITY;
            }
        }
        return rows.weigh(scores, p.scale);
    };
    auto round_weights = [&] {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    };

    constexpr int AHEAD = STAGES - 1;
    multiply<T, false, false>(scores, query, ring.take());
    ring.fill(begin + AHEAD);
    wait_for_products<0>(scores);
    weigh(begin);
    round_weights();
    for (int tile = begin + 1; tile < end; tile++) {
        const uint32_t stage = ring.take();
        multiply<T, false, false>(scores, query, stage);
        multiply<T, true, true>(out, weights, stage + Ring<D>::TILE_BYTES);
        ring.fill(tile + AHEAD);
        wait_for_products<1>(scores);
        // Weighs while the values are multiplied. Without a branch behind it, the compiler would wait for them first.
        if (weigh(tile)) {
            wait_for_products<0>(out);
#pragma unroll
            for (int i = 0; i < D / 2; i++) out[i] *= rows.shrink[i / 2 % 2];
        }
        wait_for_products<0>(out);
        round_weights();
    }
    multiply<T, true, true>(out, weights, ring.take() + Ring<D>::TILE_BYTES);
    wait_for_products<0>(out);

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = rows.total[half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float inverse = total > 0 ? 1 / total : 0;
        T* to = static_cast<T*>(p.out) + row[half] * p.out_token + head[half] * p.out_head + column;
        if (row[half] >= 0) {
#pragma unroll
            for (int i = 2 * half; i < D / 2; i += 4)
                *reinterpret_cast<uint32_t*>(to + i / 4 * 8) = pack<T>(out[i] * inverse, out[i + 1] * inverse);
        }
    }
}

template <typename T, int D>
int launch(const Problem& p, int64_t kv_heads, cudaStream_t stream) {
    constexpr int BYTES = Ring<D>::BYTES + 1024;  // to begin at a multiple of 1024
    cudaError_t error = cudaFuncSetAttribute(flash_attention<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>(kv_heads), p.num_tiles);
    flash_attention<T, D><<<grid, THREADS, BYTES, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace

// Shapes and steps as in Problem, whose fields these are; the cache's steps are in numbers, too. Returns a cudaError_t,
// cudaErrorInvalidValue for another head size.
extern "C" int labkit_flash_attention(const void* q, const void* k, const void* v, void* out, const int* tables,
                                      const int* first_rows, const int* context_lens, const int* tiles,
                                      const int64_t* steps, int64_t num_tiles, int64_t kv_heads, int64_t group,
                                      int64_t head_dim, int64_t block_size, int64_t window, int64_t bfloat16,
                                      void* stream) {
    Problem p{q, k, v, out, tables, first_rows, context_lens, tiles};
    p.q_token = steps[0], p.q_head = steps[1], p.table_row = steps[2], p.out_token = steps[3], p.out_head = steps[4];
    p.cache_block = static_cast<uint32_t>(steps[5] / 8), p.cache_token = static_cast<uint32_t>(steps[6] / 8);
    p.cache_head = static_cast<uint32_t>(steps[7] / 8);
    p.num_tiles = static_cast<int>(num_tiles), p.group = static_cast<int>(group);
    p.block_size = static_cast<int>(block_size), p.window = static_cast<int>(window);
    p.block_inverse = static_cast<uint32_t>(((uint64_t{1} << 32) + block_size - 1) / block_size);
    p.scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(head_dim)));
    const auto s = static_cast<cudaStream_t>(stream);
    if (head_dim == 64)
        return bfloat16 ? launch<__nv_bfloat16, 64>(p, kv_heads, s) : launch<__half, 64>(p, kv_heads, s);
    if (head_dim == 128)
        return bfloat16 ? launch<__nv_bfloat16, 128>(p, kv_heads, s) : launch<__half, 128>(p, kv_heads, s);
    return cudaErrorInvalidValue;
}
