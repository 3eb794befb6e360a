// What the CUDA sources share: numbers of 16 bits, kernels that begin early, clusters of blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace labkit {

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return __half2float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow(float x) {
    return x;
}
template <>
__device__ inline __half narrow(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow(float x) {
    return __float2bfloat16_rn(x);
}

// 2^x, to 2 bits of the last place; what is too small is 0
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// COUNT numbers that are loaded or stored at once.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Vector {
    T at[COUNT];
};

// 16 bytes that nobody else will want soon, or zeros.
__device__ inline uint4 load_once(const void* from, bool there) {
    uint4 v{0, 0, 0, 0};
    asm volatile(
        "{.reg .pred there; setp.ne.b32 there, %5, 0;\n"
        "@there ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<int>(there)));
    return v;
}

// Programmatic dependent launch, on Hopper: the kernel behind this one may begin, and: the kernel in front of this one
// has ended, and what it wrote can be read. labkit/kernels/launch.py says how the two belong together.
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

// Clusters of blocks came with Hopper; elsewhere these do nothing.
// All threads of all blocks of a cluster meet: each arrives once, and waits once. What a thread wrote into a block's
// shared memory before it arrived is there for those who have waited.
__device__ inline void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where `to`, an address of this block's shared memory, lies in another block's of the cluster.
__device__ inline uint32_t in_block(uint32_t to, int block) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(block));
#endif
    return to;
}

__device__ inline void store_in_block(uint32_t to, int block, float2 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(in_block(to, block)), "f"(v.x), "f"(v.y) : "memory");
#endif
}

__device__ inline void store_in_block(uint32_t to, int block, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(in_block(to, block)), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
#endif
}

}  // namespace labkit
