// Products of tiles in shared memory by a warp group (wgmma). linear_hopper.py generates `multiply` itself, because the number
// of its operands depends on the columns of a tile.
#pragma once
#include "words.cuh"

// Descriptor of a matrix with rows of 128 bytes, swizzled by 128. The pattern repeats after eight rows, 1024 bytes.
INLINE u64 matrix(const void* tile) {
    const u64 start = (shared_address(tile) & 0x3FFFF) >> 4;
    return start | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
INLINE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// After the last wait: tells the compiler that the asynchronous products have changed z.
template <int N>
INLINE void products_written(float (&z)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(z[i])::"memory");
}

// Stores four 8 x 8 matrices of 16-bit numbers, from the accumulator layout into rows of shared memory.
INLINE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
