// Barriers in shared memory that count arrivals and bytes (mbarrier), within a block and across a cluster.
#pragma once
#include "words.cuh"

INLINE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

INLINE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and bytes that the copy engine has still to bring before the phase is over.
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

// Waits for the end of the phase of this parity. What is waited for is on its way on this chip: microseconds. A fault of ours
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

// All threads of the cluster, or of the block that is alone. Barriers that were made before it (with their fence) are there.
template <int BLOCKS>
INLINE void everyone_waits() {
    if constexpr (BLOCKS > 1) {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

// Some warps of a block wait for each other; barrier 0 is the block's own.
template <int COUNT>
INLINE void threads_wait(int number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory"); }

// What threads wrote to shared memory is seen by the copy engine after this, and a barrier.
INLINE void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// One thread of a warp, always the same; ptxas knows that it is one, and takes addresses for copies without asking all.
INLINE bool elected() {
    u32 one;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p; }" : "=r"(one));
    return one;
}

// Programmatic dependent launch: the next kernel may come onto the chip; this one waits for the end of the one before it.
INLINE void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int REGISTERS>
INLINE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
