// Copies of matrix tiles by the tensor memory accelerator (TMA). A row of a tile has 64 16-bit numbers: 128 bytes, swizzled.
#pragma once
#include "barrier.cuh"

struct alignas(64) TensorMap {
    u8 bytes[128];
};

INLINE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

INLINE void load_tile(void* to, const TensorMap& map, u64* barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row)
                 : "memory");
}

// To the same address in all BLOCKS of the cluster; the barrier of each block counts the bytes.
template <int BLOCKS>
INLINE void load_tile_to(void* to, const TensorMap& map, u64* barrier, int column, int row) {
    if constexpr (BLOCKS == 1) {
        load_tile(to, map, barrier, column, row);
    } else {
        constexpr u16 all = (1 << BLOCKS) - 1;
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                     "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(all)
                     : "memory");
    }
}

// Contiguous bytes, between addresses that are multiples of 16.
INLINE void load_bytes(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

INLINE void store_tile(const TensorMap& map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(column), "r"(row)
                 : "memory");
}

INLINE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last LATER groups of stores have read their source, which may then be overwritten.
template <int LATER>
INLINE void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LATER) : "memory"); }
