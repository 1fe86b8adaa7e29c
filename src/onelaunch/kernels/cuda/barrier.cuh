// Barriers in shared memory that count arrivals and bytes (mbarrier), within a block and across a cluster.
#pragma once
#include "words.cuh"

INLINE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

INLINE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and bytes that the copies must still deliver before the phase is over.
INLINE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// The same barrier in another block of the cluster.
INLINE void barrier_arrive_at(u64* barrier, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

// Waits for the end of the phase of this parity, which takes microseconds: the data comes from this chip. A fault in this code
// ends in a trap, not in a hang.
INLINE void barrier_wait(u64* barrier, u32 parity) {
    u32 done = 0;
    for (int tries = 0; !done; ++tries) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
        if (tries > 1 << 24) __trap();
    }
}

// Barrier of all threads of the cluster, or of a single block. Afterwards all see the barriers initialised (and fenced) before.
template <int BLOCKS>
INLINE void sync_cluster() {
    if constexpr (BLOCKS > 1) {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

// Barrier of some warps of a block; number 0 is that of the whole block.
template <int COUNT>
INLINE void sync_threads(int number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory"); }

// After this and a barrier, the tensor memory accelerator sees what threads have written to shared memory.
INLINE void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one thread of a warp, always the same. ptxas knows that it is one thread, and needs no loop over the warp for copies.
INLINE bool elected() {
    u32 one;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p; }" : "=r"(one));
    return one;
}

// Programmatic dependent launch: the next kernel may start; this one waits for the end of the kernel before it.
INLINE void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int REGISTERS>
INLINE void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
INLINE void acquire_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
