// Many runs in one launch. Blocks (or clusters) take one member after another from a queue until it is empty, so the place of a
// member that has finished is free for the next one at once.
#pragma once

struct Queue {
  const Params* members;
  u32* next;  // the number of the next member that nobody has taken
  u8* scratch;  // EXCHANGE_BYTES per block: state that has no room on the chip
  u64 count;
};

INLINE void sync_member() {
#if IS_CLUSTER
  sync_cluster();
#else
  __syncthreads();
#endif
}

// Takes the next member: copies its parameters into the shared memory of every block. False when the queue is empty or stopped.
INLINE bool take_member(const Queue& queue, u32 shared) {
  sync_member();  // every block of the cluster has started, and has left the member before
  if (rank_of_block() == 0 && threadIdx.x == 0) {
    u32 index = atomicAdd(queue.next, 1u);
    if (index < queue.count && *(volatile u32*)&queue.members[index].control->stop) index = ~0u;
#if IS_CLUSTER
    for (u32 block = 0; block < BLOCKS; ++block)
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at_block(shared + AT_MEMBER, block)), "r"(index) : "memory");
#else
    store_word(shared + AT_MEMBER, index);
#endif
  }
  sync_member();
  const u32 index = load_word(shared + AT_MEMBER);
  if (index >= queue.count) return false;
  const u32* from = (const u32*)(queue.members + index);
  for (u32 i = threadIdx.x; i < sizeof(Params) / 4; i += THREADS) store_word(shared + AT_MEMBER + 16 + i * 4, from[i]);
  __syncthreads();
  if (EXCHANGE_BYTES && threadIdx.x == 0) {
    Params* member = (Params*)__cvta_shared_to_generic(shared + AT_MEMBER + 16);
    member->exchange = (u32*)(queue.scratch + (u64)block_number() * EXCHANGE_BYTES);
  }
  __syncthreads();
  return true;
}
// After a fault nobody takes another member.
INLINE void close_queue(const Queue& queue) { if (threadIdx.x == 0) atomicExch(queue.next, 0x7fffffffu); }

// The last exchanges have arrived, and all blocks have written their weights: tells the host, and makes the barriers plain memory again.
INLINE void end_member(const Context& c) {
  __threadfence();
  sync_member();
  if (threadIdx.x == 0) {
    if (c.rank == 0) {
      __threadfence_system();
      *(volatile u32*)&c.p->control->finished = 1;
    }
#if BULK
    for (u32 i = 0; i < X_BUFFERS; ++i) end_barrier(Inputs<Layer0>::barrier_at(c, i));
#if IS_CLUSTER
    for (u32 i = 0; i < 2 * EXCHANGES; ++i) end_barrier(c.shared + AT_BARRIERS + i * 8);
#endif
#endif
  }
}
