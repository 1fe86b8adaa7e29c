// How blocks hand values to each other, and how they wait: always bounded.
//
// An exchange is a slot every block fills together: in a cluster it lies in everyone's shared memory and is written by
// `st.async`, whose bytes complete a barrier at the receiver; in a grid it lies in global memory (L2) and each writer raises a
// flag of its own, which a reading warp awaits only for the writers of the values it is about to read; a single block needs
// neither. Slots come in pairs used in turn. That is enough: a block that has the outputs of pass n + 1 before it knows that
// every block has left pass n (the last layer reads every hidden unit, and those follow from all before them).
#pragma once
#include "base.cuh"

struct Control {  // in the host's memory
  u32 stop;       // set by the host: end the run at the next look
  u32 done;       // steps finished
  u32 epochs;     // epochs (or parts of one) finished and recorded
  u32 fault;      // 1 + the exchange somebody waited for in vain
  u32 fault_block, fault_step;
  float loss;     // of the last step before `done`
  u32 correct;    // right predictions so far in this epoch
};
struct Record {  // of an epoch
  double check_loss;
  u64 check_correct, correct;
};
struct Params {
  const u8 *x, *check_x;
  const u32 *y, *check_y;  // one class, or OUTPUTS floats, a row
  float *weights, *state[2];
  u32 *exchange, *flags;
  Control* control;
  float* losses;
  Record* records;
  u32* stamps;  // clocks spent in each phase, where the source was made to take them
  u64 rows, check_rows, seed, first_step, last_step, steps_per_epoch, total_steps, patience, fault_step, fault_block;
  double lr, momentum, weight_decay, log_beta1, log_beta2, new_mean, new_square, beta2, eps, smoothing;
};

struct Context {
  const Params* p;
  u32 lane, warp, g, q, rank, shared;
  u32 remote[(BLOCKS + 3) / 4];  // shared memory of the blocks this lane sends to: q, q + 4, …
  u32 passes, backs, step;  // forward passes, backward passes and updates so far in this launch
  u32 turn;                 // which half of the partial sums is next
  bool dead;                // a wait was in vain: leave
};

#if IS_CLUSTER
INLINE u32 at_block(u32 address, u32 block) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
INLINE void send(u32 address, const u32 (&w)[4], u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(barrier) : "memory");
}
INLINE void send(u32 address, u32 a, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(a), "r"(barrier) : "memory");
}
INLINE void make_barriers(Context& c) {
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2 * EXCHANGES; ++i) make_barrier(c.shared + AT_BARRIERS + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (u32 i = 0; i < EXCHANGES; ++i)
      for (u32 pair = 0; pair < 2; ++pair)
        if (exchange_bytes(i, c.rank)) expect_bytes(c.shared + AT_BARRIERS + (i * 2 + pair) * 8, exchange_bytes(i, c.rank));
  }
}
INLINE void meet_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// For the test that nobody waits for ever: one block says nothing at one step.
INLINE bool stays_silent(const Context& c) {
  if constexpr (FAULTS) return c.p->fault_step == c.p->first_step + c.step && c.p->fault_block == c.rank;
  return false;
}

// A wait was in vain: from now on nothing is waited for, and the host is told at the end, once, by whoever comes first.
INLINE void give_up(Context& c, u32 exchange) {
  c.dead = true;
  store_shared(c.shared + AT_FAULT, 1u + exchange, c.step);
}
INLINE void tell_fault(const Context& c) {
  Control* control = c.p->control;
  const u32 fault = load_word(c.shared + AT_FAULT);
  if (fault && atomicCAS_system(&control->fault, 0u, fault) == 0u) {
    control->fault_block = c.rank;
    control->fault_step = (u32)c.p->first_step + load_word(c.shared + AT_FAULT + 4);
  }
}

#if BULK
INLINE void await_phase(Context& c, u32 barrier, u32 phase, u32 exchange) {
  if (arrived(barrier, phase)) return;
  const u64 begin = clock_now();
  while (!arrived(barrier, phase))
    if (clock_now() - begin > c.p->patience) return give_up(c, exchange);
}
#endif

// Wait until all that will be written into use number `count` of an exchange (counted from 0) has arrived. In a grid, a warp
// awaits the blocks that write the 16-value steps `warp, warp + WARPS, …` below `steps`, `tiles` tiles of eight a block.
template <int EXCHANGE> INLINE void wait_for(Context& c, u32 count, u32 steps, u32 tiles) {
  if constexpr (BLOCKS == 1) {
    __syncthreads();
    return;
  }
  if (c.dead) return;
#if IS_CLUSTER
  if (exchange_bytes(EXCHANGE, c.rank) == 0) return;
  const u32 barrier = c.shared + AT_BARRIERS + (EXCHANGE * 2 + (count & 1)) * 8;
  await_phase(c, barrier, (count >> 1) & 1, EXCHANGE);
  if (threadIdx.x == 0 && !c.dead) expect_bytes(barrier, exchange_bytes(EXCHANGE, c.rank));
#else
  const u64 begin = clock_now();
  for (u32 first = c.lane >> 1; first * WARPS + c.warp < steps && !c.dead; first += 16) {  // two lanes a step, one a tile of it
    const u32 writer = ((first * WARPS + c.warp) * 2 + (c.lane & 1)) / tiles;
    if (writer >= BLOCKS) break;
    const u32* flag = c.p->flags + (EXCHANGE * BLOCKS + writer) * FLAG_STRIDE;
    while ((int)(load_acquire(flag) - (count + 1)) < 0)
      if (clock_now() - begin > c.p->patience) {
        give_up(c, EXCHANGE);
        break;
      }
  }
  c.dead = __any_sync(~0u, c.dead);
  __syncwarp();  // what one lane has acquired, all may read
#endif
}

// All of this block's values for use number `count` of the exchange are written (by any of its threads).
template <int EXCHANGE> INLINE void written(Context& c, u32 count) {
  if constexpr (BLOCKS > 1 && !IS_CLUSTER) {
    __syncthreads();
    if (threadIdx.x == 0 && !stays_silent(c)) store_release(c.p->flags + (EXCHANGE * BLOCKS + c.rank) * FLAG_STRIDE, count + 1);
  }
}

// Slots. Left operands lie at index (plane, row tile, step of 16 units), 512 bytes each; right operands at index (plane, tile of
// eight inputs, tile of eight units), 128 bytes each. STRIDE: to the other one of a pair, or 0.
//
// In a grid a warp first brings its steps (`warp, warp + WARPS, …` below KT) of a slot into shared memory, each lane its own 16
// bytes: all of them are on their way at once, and nobody else needs to be asked before they are read.
constexpr bool SLOTS_SHARED = BLOCKS == 1 || IS_CLUSTER;
template <int AT, u32 STRIDE> INLINE u32 slot_offset(u32 count) { return AT + (count & 1) * STRIDE; }

INLINE u32 staged_at(const Context& c, int part, int ks) { return c.shared + AT_STAGING + (((ks * WARPS + c.warp) * (PLANES * ROW_TILES) + part) * 32 + c.lane) * 16; }

template <int AT, u32 STRIDE, int KT> INLINE void stage(const Context& c, u32 count) {
  if constexpr (!SLOTS_SHARED) {
    const u32* slot = c.p->exchange + slot_offset<AT, STRIDE>(count) / 4 + c.lane * 4;
#pragma unroll
    for (int ks = 0; ks < (KT + WARPS - 1) / WARPS; ++ks) {
      const int step = ks * WARPS + c.warp;
      if ((ks + 1) * WARPS <= KT || step < KT)
#pragma unroll
        for (int part = 0; part < PLANES * ROW_TILES; ++part) copy_16_bytes(staged_at(c, part, ks), slot + (part * KT + step) * 128);
    }
    copies_issued();
  }
}
// All but the LATER lots of copies are there.
template <int LATER = 0> INLINE void staged() {
  if constexpr (!SLOTS_SHARED) asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
// The left operand of a plane, a row tile (`part` counts both) and the warp's step `ks`, of a slot of KT steps.
template <int AT, u32 STRIDE, int KT> INLINE void read_left(const Context& c, u32 count, int part, int ks, u32 (&w)[4]) {
  if constexpr (SLOTS_SHARED) load_matrices(c.shared + slot_offset<AT, STRIDE>(count) + (part * KT + ks * WARPS + c.warp) * 512 + c.lane * 16, w);
  else load_shared(staged_at(c, part, ks), w);
}
// The same values as the left operand whose rows are the units and whose k are the rows.
template <int AT, u32 STRIDE, int KT> INLINE void read_left_transposed(const Context& c, u32 count, int part, int ks, u32 (&w)[4]) {
  u32 t[4];
  if constexpr (SLOTS_SHARED) {
    load_transposed(c.shared + slot_offset<AT, STRIDE>(count) + (part * KT + ks * WARPS + c.warp) * 512 + c.lane * 16, t);
    w[0] = t[0], w[1] = t[2], w[2] = t[1], w[3] = t[3];
  } else {
    read_left<AT, STRIDE, KT>(c, count, part, ks, t);
    w[0] = transposed(t[0]), w[1] = transposed(t[2]), w[2] = transposed(t[1]), w[3] = transposed(t[3]);
  }
}
// `index` of the first of the two tiles of a step. OWN: from the slot meant for this block, not for all.
template <int AT, u32 STRIDE, bool OWN> INLINE void read_right(const Context& c, u32 count, u32 index, u32 (&w)[2]) {
  const u32 slot = slot_offset<AT, STRIDE>(count) + index * 128;
  if constexpr (SLOTS_SHARED) load_matrices(c.shared + slot + (c.lane & 15) * 16, w);
  else load_global(c.p->exchange + (slot + (OWN ? c.rank * STRIDE * 2 : 0) + c.lane * 8) / 4, w);
}

// FINISH blocks of 8 x 8 values (rows `half * 8 + g` and, for two, eight further) of a tile of units into everyone's slot.
// `index` as for reading; `odd`: whether the tile is the second of its step.
template <int EXCHANGE, int AT, u32 STRIDE, int N> INLINE void publish_left(const Context& c, u32 count, u32 index, u32 odd, u32 half, const u32 (&w)[N]) {
  const u32 slot = slot_offset<AT, STRIDE>(count) + index * 512;
  if constexpr (BLOCKS == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) store_word(c.shared + slot + odd * 256 + (half + i) * 128 + c.g * 16 + c.q * 4, w[i]);
  }
#if IS_CLUSTER
  else {
    if (stays_silent(c)) return;
    const u32 barrier = AT_BARRIERS + (EXCHANGE * 2 + (count & 1)) * 8;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      u32 row[4];
      gather_quad(w[i], row);
      const u32 at = slot + odd * 256 + (half + i) * 128 + c.g * 16;
#pragma unroll
      for (u32 to = 0; to < (BLOCKS + 3) / 4; ++to)
        if (BLOCKS % 4 == 0 || to * 4 + c.q < BLOCKS) send(c.remote[to] + at, row, c.remote[to] + barrier);
    }
  }
#else
  else {
    static_assert(BLOCKS == 1 || N == 2, "in a grid a lane has both rows");
    store_global(c.p->exchange + (slot + c.lane * 16 + odd * 8) / 4, w[0], w[N - 1]);
  }
#endif
}
// A packed 8 x 8 block of weights (inputs along the rows) into the slot of the block that multiplies by it on the way back.
#if !IS_CLUSTER
template <int AT, u32 STRIDE> INLINE void send_right(const Context& c, u32 count, u32 to, u32 index, u32 word) {
  if constexpr (BLOCKS == 1) store_word(c.shared + slot_offset<AT, STRIDE>(count) + index * 128 + c.lane * 4, word);
  else store_global(c.p->exchange + (slot_offset<AT, STRIDE>(count) + to * STRIDE * 2 + (index & ~1u) * 128 + c.lane * 8 + (index & 1) * 4) / 4, word);
}
#endif
// The same for all: into everyone's slot.
template <int EXCHANGE, int AT, u32 STRIDE> INLINE void publish_right(const Context& c, u32 count, u32 index, u32 word) {
  const u32 slot = slot_offset<AT, STRIDE>(count);
  if constexpr (BLOCKS == 1) store_word(c.shared + slot + index * 128 + c.lane * 4, word);
#if IS_CLUSTER
  u32 row[4];
  gather_quad(word, row);
  const u32 barrier = AT_BARRIERS + (EXCHANGE * 2 + (count & 1)) * 8;
#pragma unroll
  for (u32 to = 0; to < (BLOCKS + 3) / 4; ++to)
    if (BLOCKS % 4 == 0 || to * 4 + c.q < BLOCKS) send(c.remote[to] + slot + index * 128 + c.g * 16, row, c.remote[to] + barrier);
#else
  if constexpr (BLOCKS > 1) store_global(c.p->exchange + (slot + (index & ~1u) * 128 + c.lane * 8 + (index & 1) * 4) / 4, word);
#endif
}
#if IS_CLUSTER
// Four blocks of weights at once, `index[i]` in the slot of block `to[i]` (or nowhere, beyond the last block): a lane sends one row.
template <int EXCHANGE, int AT, u32 STRIDE> INLINE void send_four_right(const Context& c, u32 count, const u32 (&to)[4], const u32 (&index)[4], u32 (&words)[4]) {
  transpose_quad(words);
  const u32 block = pick(to, c.q), slot = slot_offset<AT, STRIDE>(count) + pick(index, c.q) * 128;
  if (block >= BLOCKS) return;
  const u32 there = at_block(c.shared, block);
  send(there + slot + c.g * 16, words, there + AT_BARRIERS + (EXCHANGE * 2 + (count & 1)) * 8);
}
#endif

// One word from block 0 to all: the same decision everywhere. Uses of it are counted by `count`.
INLINE u32 agreed(Context& c, u32 count, u32 word) {
  if constexpr (BLOCKS == 1) {
    if (threadIdx.x == 0) store_word(c.shared + AT_DECISION, word);
    __syncthreads();
    return load_word(c.shared + AT_DECISION);
  }
#if IS_CLUSTER
  if (c.rank == 0 && threadIdx.x < BLOCKS) {
    const u32 barrier = c.shared + AT_BARRIERS + (DECISION * 2 + (count & 1)) * 8;
    send(at_block(c.shared + AT_DECISION + (count & 1) * 4, threadIdx.x), word, at_block(barrier, threadIdx.x));
  }
  wait_for<DECISION>(c, count, 0, 1);
  return load_word(c.shared + AT_DECISION + (count & 1) * 4);
#else
  u32* flag = c.p->flags + (DECISION * BLOCKS) * FLAG_STRIDE;
  if (threadIdx.x == 0) {
    if (c.rank == 0) store_release(flag, (count + 1) * 2 + word);
    const u64 begin = clock_now();
    u32 found = load_acquire(flag);
    while ((int)(found / 2 - (count + 1)) < 0 && !c.dead) {
      if (clock_now() - begin > c.p->patience) give_up(c, DECISION);
      found = load_acquire(flag);
    }
    store_word(c.shared + AT_DECISION, found & 1);
  }
  __syncthreads();
  return load_word(c.shared + AT_DECISION);
#endif
}
