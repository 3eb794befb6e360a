// Products of small matrices on an NVIDIA GPU's tensor cores, and how their operands lie in registers and in memory.
//
// A warp multiplies 16 rows. Lane l holds, of the sums C [16, N], for every 8 columns n:
//
//     row l / 4      columns 8n + 2 (l % 4), + 1      sums[4n], sums[4n + 1]
//     row l / 4 + 8  the same columns                 sums[4n + 2], sums[4n + 3]
//
// and of the left operand A [16, K], two 16-bit numbers a register, for every 16 columns k:
//
//     row l / 4      columns 16k + 2 (l % 4), + 1     a[k][0]        columns 16k + 8 + 2 (l % 4), + 1    a[k][2]
//     row l / 4 + 8  the same columns                 a[k][1]        the same columns                    a[k][3]
//
// So sums of a product, rounded to 16 bits, are the left operand of the next without leaving their registers.
//
// The right operand comes from a tile [ROWS, D] in shared memory: panels of 64 columns, one behind the other, whose
// rows are 128 bytes. Within a row, the eight pieces of 16 bytes are permuted, piece c standing at c ^ (row % 8):
// what is read together, a column of eight rows, then lies in eight different groups of memory banks.
//
// On Hopper (built for sm_90a) `multiply` is wgmma: four warps together, 64 rows, while the warps go on; the hardware
// reads the tile itself, described by 64 bits. Elsewhere, from sm_80 on, it is mma.sync. Layouts: PTX ISA, sections
// "Matrix fragments for mma.m16n8k16" and "Asynchronous warpgroup level matrix multiply-accumulate".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LABKIT_WGMMA 1
#else
#define LABKIT_WGMMA 0
#endif

namespace labkit {

constexpr int PANEL = 64;  // columns of 16 bits

// Byte of column 8 * piece of a row, within a tile of ROWS rows.
template <int ROWS>
__device__ inline uint32_t place(int row, int piece) {
    return piece / 8 * (ROWS * 128) + row * 128 + ((piece ^ row) & 7) * 16;
}

template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 both = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    }
}

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, on their own.
__device__ inline void copy_async(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last PENDING groups of this thread's copies are there, for this thread.
template <int PENDING>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What this thread has in shared memory is there for `multiply`, too.
__device__ inline void show_to_products() {
#if LABKIT_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// sums [16, 8] += A [16, 16] B [16, 8]: lane l has rows 2 (l % 4), + 1 of B's column l / 4 in b0, rows + 8 in b1.
#define LABKIT_MMA(TYPE)                                                                                             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
                 "{%0,%1,%2,%3};"                                                                                    \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <typename T>
__device__ inline void mma(float* sums, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        LABKIT_MMA("f16");
    else
        LABKIT_MMA("bf16");
}

// An 8 × 8 matrix of 16-bit numbers, of which lane l has columns 2 (l % 4), + 1 of row l / 4: its transpose.
__device__ inline uint32_t transposed(uint32_t m) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(m));
    return m;
}

// Four 8 × 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED>
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
}

#if LABKIT_WGMMA

#define LABKIT_8(x, i) x(i), x(i + 1), x(i + 2), x(i + 3), x(i + 4), x(i + 5), x(i + 6), x(i + 7)
#define LABKIT_32(x, i) LABKIT_8(x, i), LABKIT_8(x, i + 8), LABKIT_8(x, i + 16), LABKIT_8(x, i + 24)
#define LABKIT_SUM(i) "+f"(sums[i])
#define LABKIT_0_31                                                                                                   \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31"
#define LABKIT_32_63                                                                                                  \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
    "%60,%61,%62,%63"
#define LABKIT_WGMMA_64(TYPE)                                                                                      \
    asm volatile(                                                                                                  \
        "{.reg .pred add; setp.ne.b32 add, %37, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" LABKIT_0_31 "}, {%32,%33,%34,%35}, %36, " \
        "add, 1, 1, %38;}"                                                                                         \
        : LABKIT_32(LABKIT_SUM, 0)                                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ROWS_ARE_K))
#define LABKIT_WGMMA_128(TYPE)                                                                                    \
    asm volatile(                                                                                                 \
        "{.reg .pred add; setp.ne.b32 add, %69, 0;\n"                                                             \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" LABKIT_0_31 "," LABKIT_32_63            \
        "}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;}"                                                             \
        : LABKIT_32(LABKIT_SUM, 0), LABKIT_32(LABKIT_SUM, 32)                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(ROWS_ARE_K))

// 16 columns of A times 16 rows of B, N columns; b describes them.
template <typename T, int ROWS_ARE_K, int N>
__device__ inline void wgmma(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
    constexpr bool HALF = std::is_same_v<T, __half>;
    if constexpr (N == 64 && HALF) LABKIT_WGMMA_64("f16");
    if constexpr (N == 64 && !HALF) LABKIT_WGMMA_64("bf16");
    if constexpr (N == 128 && HALF) LABKIT_WGMMA_128("f16");
    if constexpr (N == 128 && !HALF) LABKIT_WGMMA_128("bf16");
}

// A tile for the hardware: where it begins, how far panels and groups of eight rows are apart (all in units of 16
// bytes), and the permutation (1: over 128 bytes).
template <int ROWS>
__device__ inline uint64_t describe(uint32_t begin) {
    constexpr uint64_t PANELS = ROWS * 128 / 16, EIGHT_ROWS = 8 * 128 / 16;
    return uint64_t{1} << 62 | EIGHT_ROWS << 32 | PANELS << 16 | (begin & 0x3FFFF) >> 4;
}

#endif

// sums [16 a warp, N] += A [16 a warp, K] times a tile. ROWS_ARE_K: the tile is [K, N]; otherwise [N, K], and its
// transpose is meant. ADD false: sums = the product. All warps of the block come here; on Hopper the sums and A must
// not be touched before `wait_for_products`.
template <typename T, bool ROWS_ARE_K, bool ADD, int N, int K>
__device__ inline void multiply(float (&sums)[N], const uint32_t (&a)[K][4], uint32_t tile) {
    constexpr int COLUMNS = 2 * N, STEPS = K, ROWS = ROWS_ARE_K ? 16 * STEPS : COLUMNS;
#if LABKIT_WGMMA
    const uint64_t b = describe<ROWS>(tile);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const int begin = ROWS_ARE_K ? k * 16 * 128 : k / 4 * (ROWS * 128) + k % 4 * 32;
        wgmma<T, ROWS_ARE_K, COLUMNS>(sums, a[k], b + begin / 16, ADD || k > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    const int lane = threadIdx.x % 32, low = lane / 8 % 2, high = lane / 16;
    if (!ADD) {
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = 0;
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {  // 16 columns: two products
            // The matrices: k 0-7 and 8-15 of the first 8 columns, then of the other 8.
            const int row = ROWS_ARE_K ? 16 * k + 8 * low : 16 * n + 8 * high;
            const int piece = ROWS_ARE_K ? 2 * n + high : 2 * k + low;
            uint32_t b[4];
            load_matrices<ROWS_ARE_K>(b, tile + place<ROWS>(row + lane % 8, piece));
            mma<T>(sums + 8 * n, a[k], b[0], b[1]);
            mma<T>(sums + 8 * n + 4, a[k], b[2], b[3]);
        }
    }
#endif
}

// Until all but the last PENDING products are in their sums.
template <int PENDING, int N>
__device__ inline void wait_for_products(float (&sums)[N]) {
#if LABKIT_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");  // nobody reads them earlier
#endif
}

}  // namespace labkit
