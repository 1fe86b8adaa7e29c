// How blocks send values to each other, and how they wait. Every wait is bounded.
//
// An exchange is a slot that all blocks fill together. In a cluster the slot is in every block's shared memory and is written by
// `st.async`, whose bytes complete a barrier at the receiver. In a grid it is in global memory (L2), and each writer raises a flag
// of its own; a warp awaits only the flags of the blocks whose values it is about to read. A single block needs neither. Slots come
// in pairs that are used in turn. Two are enough: a block that has the outputs of pass n + 1 knows that every block has left pass
// n, because the last layer reads every hidden unit, and those depend on all layers before.
#pragma once
#include "base.cuh"

struct Control {  // in host memory
  u32 stop;  // set by the host: end the run at the next poll
  u32 done;       // steps finished
  u32 epochs;     // epochs (or parts of one) finished and recorded
  u32 fault;  // 1 + the number of the exchange for which a block's wait timed out
  u32 fault_block, fault_step;
  float loss;     // of the last step before `done`
  u32 correct;  // correct predictions so far in this epoch
  u32 finished;  // of a member: its weights, losses and records are in device memory
};
struct Record {  // of an epoch
  double validation_loss;
  u64 validation_correct, correct;
};
struct Params {
  const u8 *x, *validation_x;
  const u32 *y, *validation_y;  // per row one class, or OUTPUTS floats; if WEIGHTED, then its weight, a float
  float *weights, *state[2];
  u32 *exchange, *flags;
  Control* control;
  float* losses;
  Record* records;
  u32* stamps;  // clocks spent in each phase, if STAMPS
  u64 rows, validation_rows, seed, first_step, last_step, steps_per_epoch, total_steps, patience, fault_step, fault_block, all_rows;
  double lr, momentum, weight_decay, log_beta1, log_beta2, new_mean, new_square, beta2, eps, label_smoothing;
  // Of a member. Its rows are `row_numbers[i]` of x and y (i itself if null); `keep`: threshold and scale of every dropout.
  const u32* row_numbers;
  u64 permutation_bits;
  u32 keep[2 * MAX_DROPOUTS];
  double* batch_weights;  // if WEIGHTED: the summed weights of each batch of the launch
};

struct Context {
  const Params* p;
  u32 lane, warp, g, q, rank, shared;
  u32 remote[(BLOCKS + 3) / 4];  // shared memory of the blocks that this lane sends to: q, q + 4, …
  u32 passes, backs, step;  // forward passes, backward passes and updates so far in this launch
  u32 turn;  // which buffer of partial sums is next
  bool dead;  // a wait timed out: leave the run
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
INLINE void sync_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// For the test that no block waits for ever: one block sends nothing at one step.
INLINE bool stays_silent(const Context& c) {
  if constexpr (FAULTS) return c.p->fault_step == c.p->first_step + c.step && c.p->fault_block == c.rank;
  return false;
}

// A wait timed out: from now on this thread waits for nothing. The first block that fails reports to the host, once, at the end.
INLINE void give_up(Context& c, u32 exchange) {
  c.dead = true;
  store_shared(c.shared + AT_FAULT, 1u + exchange, c.step);
}
INLINE void report_fault(const Context& c) {
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

// Wait until everything that belongs to use number `count` (from 0) of an exchange has arrived. In a grid, a warp awaits the
// blocks that write the k tiles `warp, warp + WARPS, …` below `k_tiles`; each block writes `n_tiles` tiles of eight units.
template <int EXCHANGE> INLINE void wait_for(Context& c, u32 count, u32 k_tiles, u32 n_tiles) {
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
  for (u32 first = c.lane >> 1; first * WARPS + c.warp < k_tiles && !c.dead; first += 16) {  // two lanes per k tile, one for each of its tiles
    const u32 writer = ((first * WARPS + c.warp) * 2 + (c.lane & 1)) / n_tiles;
    if (writer >= BLOCKS) break;
    const u32* flag = c.p->flags + (EXCHANGE * BLOCKS + writer) * FLAG_STRIDE;
    while ((int)(load_acquire(flag) - (count + 1)) < 0)
      if (clock_now() - begin > c.p->patience) {
        give_up(c, EXCHANGE);
        break;
      }
  }
  c.dead = __any_sync(~0u, c.dead);
  __syncwarp();  // all lanes may read what one lane has acquired
#endif
}

// All threads of this block have written its values for use number `count` of the exchange.
template <int EXCHANGE> INLINE void raise_flag(Context& c, u32 count) {
  if constexpr (BLOCKS > 1 && !IS_CLUSTER) {
    __syncthreads();
    if (threadIdx.x == 0 && !stays_silent(c)) store_release(c.p->flags + (EXCHANGE * BLOCKS + c.rank) * FLAG_STRIDE, count + 1);
  }
}

// Slots. Left operands have the index (plane, row tile, k tile of 16 units) and 512 bytes each; right operands have the index
// (plane, tile of eight inputs, tile of eight units) and 128 bytes each. STRIDE: offset of the other slot of the pair, or 0.
//
// In a grid a warp first copies its k tiles (`warp, warp + WARPS, …` below K_TILES) of a slot into shared memory, 16 bytes per
// lane. All copies are in flight at once, and each lane reads only what it copied itself.
constexpr bool SLOTS_SHARED = BLOCKS == 1 || IS_CLUSTER;
template <int AT, u32 STRIDE> INLINE u32 slot_offset(u32 count) { return AT + (count & 1) * STRIDE; }

INLINE u32 staged_at(const Context& c, int part, int k) { return c.shared + AT_STAGING + (((k * WARPS + c.warp) * (PLANES * ROW_TILES) + part) * 32 + c.lane) * 16; }

template <int AT, u32 STRIDE, int K_TILES> INLINE void stage(const Context& c, u32 count) {
  if constexpr (!SLOTS_SHARED) {
    const u32* slot = c.p->exchange + slot_offset<AT, STRIDE>(count) / 4 + c.lane * 4;
#pragma unroll
    for (int k = 0; k < (K_TILES + WARPS - 1) / WARPS; ++k) {
      const int k_tile = k * WARPS + c.warp;
      if ((k + 1) * WARPS <= K_TILES || k_tile < K_TILES)
#pragma unroll
        for (int part = 0; part < PLANES * ROW_TILES; ++part) copy_16_bytes(staged_at(c, part, k), slot + (part * K_TILES + k_tile) * 128);
    }
    copies_issued();
  }
}
// All but the last LATER groups of copies have arrived.
template <int LATER = 0> INLINE void wait_for_staging() {
  if constexpr (!SLOTS_SHARED) asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
// The left operand of a plane and a row tile (`part` counts both) and the warp's k tile number `k`, of a slot of K_TILES k tiles.
template <int AT, u32 STRIDE, int K_TILES> INLINE void read_left(const Context& c, u32 count, int part, int k, u32 (&w)[4]) {
  if constexpr (SLOTS_SHARED) load_matrices(c.shared + slot_offset<AT, STRIDE>(count) + (part * K_TILES + k * WARPS + c.warp) * 512 + c.lane * 16, w);
  else load_shared(staged_at(c, part, k), w);
}
// The same values as the left operand whose rows are the units and whose k are the rows of the batch.
template <int AT, u32 STRIDE, int K_TILES> INLINE void read_left_transposed(const Context& c, u32 count, int part, int k, u32 (&w)[4]) {
  if constexpr (SLOTS_SHARED) {
    load_transposed(c.shared + slot_offset<AT, STRIDE>(count) + (part * K_TILES + k * WARPS + c.warp) * 512 + transposed_lane(c.lane) * 16, w);
  } else {
    u32 t[4];
    read_left<AT, STRIDE, K_TILES>(c, count, part, k, t);
    w[0] = transposed(t[0]), w[1] = transposed(t[2]), w[2] = transposed(t[1]), w[3] = transposed(t[3]);
  }
}
// `index`: of the first of the two tiles of a k tile. OWN: from the slot of this block, not from the one for all.
template <int AT, u32 STRIDE, bool OWN> INLINE void read_right(const Context& c, u32 count, u32 index, u32 (&w)[2]) {
  const u32 slot = slot_offset<AT, STRIDE>(count) + index * 128;
  if constexpr (SLOTS_SHARED) load_matrices(c.shared + slot + (c.lane & 15) * 16, w);
  else load_global(c.p->exchange + (slot + (OWN ? c.rank * STRIDE * 2 : 0) + c.lane * 8) / 4, w);
}

// Writes ROW_BLOCKS_PER_WARP blocks of 8 x 8 values of a tile of units (rows `half * 8 + g` and, for two, eight further) into every
// block's slot. `index` as for reading; `odd`: whether the tile is the second of its k tile.
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
// Writes a packed 8 x 8 block of weights (inputs along the rows) into the slot of the block that needs it in the backward pass.
#if !IS_CLUSTER
template <int AT, u32 STRIDE> INLINE void send_right(const Context& c, u32 count, u32 to, u32 index, u32 word) {
  if constexpr (BLOCKS == 1) store_word(c.shared + slot_offset<AT, STRIDE>(count) + index * 128 + c.lane * 4, word);
  else store_global(c.p->exchange + (slot_offset<AT, STRIDE>(count) + to * STRIDE * 2 + (index & ~1u) * 128 + c.lane * 8 + (index & 1) * 4) / 4, word);
}
#endif
// The same, into every block's slot.
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
// Four blocks of weights at once, `index[i]` in the slot of block `to[i]` (no block if beyond the last). A lane sends one row.
template <int EXCHANGE, int AT, u32 STRIDE> INLINE void send_four_right(const Context& c, u32 count, const u32 (&to)[4], const u32 (&index)[4], u32 (&words)[4]) {
  transpose_quad(words);
  const u32 block = pick(to, c.q), slot = slot_offset<AT, STRIDE>(count) + pick(index, c.q) * 128;
  if (block >= BLOCKS) return;
  const u32 there = at_block(c.shared, block);
  send(there + slot + c.g * 16, words, there + AT_BARRIERS + (EXCHANGE * 2 + (count & 1)) * 8);
}
#endif

// One word from block 0 to all, so that all blocks decide the same. `count` numbers the uses.
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
