// The end of a step where blocks divide the rows: the gradient of the weights, its sum over the blocks, the update, new copies.
#pragma once
#include "rows.cuh"

// The gradient of the weights. The tiles of a layer, in the order of their k tiles, are divided among the warps, SLOTS consecutive
// ones each. Slot numbers run through all layers, and slot s of every warp belongs to block s % BLOCKS.
template <class L> INLINE int tile_of(const Context& c, int slot) { return c.warp * L::SLOTS + slot; }
template <class L> INLINE bool is_tile(int tile) { return L::SLOTS * WARPS == L::K_TILES * L::N_TILES || tile < L::K_TILES * L::N_TILES; }
template <class L, class Read> INLINE void add_gradient(const Context& c, float (&gradient)[ALL_SLOTS][4], Read read) {
  constexpr bool SAME_K_TILE = L::N_TILES % L::SLOTS == 0;  // all tiles of the warp have the same inputs
  constexpr int PAIR = SAME_K_TILE && L::SLOTS % 2 == 0 ? 2 : 1;  // neighbours, read at once
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
  for (int m = 0; m < ROW_TILES; ++m) {
    u32 left[L::IN_PLANES][4];
#pragma unroll
    for (int slot = 0; slot < L::SLOTS; slot += PAIR) {
      const int tile = tile_of<L>(c, slot), k_tile = tile / L::N_TILES, n = tile % L::N_TILES;
      if (!is_tile<L>(tile)) break;
      if (slot == 0 || !SAME_K_TILE)
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane) read(m, k_tile, plane, left[plane]);
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 delta[PAIR * 2];
        load_transposed(unit_tile_at<L>(c, L::AT_DELTA, right, m, n) + (c.lane & (PAIR * 16 - 1)) * 16, delta);
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane)
#pragma unroll
          for (int i = 0; i < PAIR; ++i)
            if (plane + right < PLANES) multiply_add(gradient[L::FIRST_SLOT + slot + i], left[plane], delta[i * 2], delta[i * 2 + 1]);
      }
    }
  }
}
// The values of layer L as the left operand whose k are the rows.
template <class L> INLINE void read_values_transposed(const Context& c, int m, int k_tile, int plane, u32 (&w)[4]) {
  load_transposed(unit_tile_at<L>(c, L::AT_VALUES, plane, m, k_tile * 2) + transposed_lane(c.lane) * 16, w);
}

struct OwnWeights {  // tiles of slots rank, rank + BLOCKS, …
  static constexpr int N = (ALL_SLOTS + BLOCKS - 1) / BLOCKS;
  Tiles<N, IN_REGISTERS> master;
  Tiles<(STATES > 0 ? N : 1), STATE0_MEMORY> state0;
  Tiles<(STATES > 1 ? N : 1), STATE1_MEMORY> state1;
};
template <class L, bool LOAD> INLINE void move_tile(const Context& c, int slot, float (&t)[4], float* flat) {
  const int tile = tile_of<L>(c, slot), k_tile = tile / L::N_TILES, n = tile % L::N_TILES;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int in = input_of<L>(k_tile, c.g + (e >> 1) * 8), out = n * 8 + c.q * 2 + (e & 1);
    const bool real = tile < L::K_TILES * L::N_TILES && in < L::IN && out < L::OUT;
    float* at = flat + L::WEIGHT_AT + (u64)out * L::IN + in;
    if (LOAD) t[e] = real ? *at : 0.f;
    else if (real) *at = t[e];
  }
}
template <class L> INLINE void copy_tile(const Context& c, u32 count, int slot, const float (&t)[4]) {
  const int tile = tile_of<L>(c, slot), k_tile = tile / L::N_TILES, n = tile % L::N_TILES;
  if (!is_tile<L>(tile)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 planes[PLANES];
    split(t[half * 2], t[half * 2 + 1], planes);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
      publish_right<COPIES, L::AT_COPIES, 0>(c, count, (plane * L::N_TILES + n) * (L::K_TILES * 2) + k_tile * 2 + half, transposed(planes[plane]));
  }
}
// Runs `act` with the layer that a slot belongs to as L.
#define WITH_LAYER_OF(slot, act) EACH_LAYER(if ((slot) >= L::FIRST_SLOT && (slot) < L::FIRST_SLOT + L::SLOTS) { act; })

template <bool LOAD> INLINE void move_weights(const Context& c, OwnWeights& w) {
  if (LOAD) {
    w.state0.place(c, AT_STATE0);
    w.state1.place(c, AT_STATE1);
  }
#pragma unroll
  for (int kind = 0; kind <= STATES; ++kind) {
    float* flat = kind == 0 ? c.p->weights : c.p->state[kind - 1];
#pragma unroll
    for (int i = 0; i < OwnWeights::N; ++i) {
      const int slot = i * BLOCKS + c.rank;
      float t[4] = {0.f, 0.f, 0.f, 0.f};
      if (!LOAD) kind == 0 ? w.master.get(i, t) : kind == 1 ? w.state0.get(STATES > 0 ? i : 0, t) : w.state1.get(STATES > 1 ? i : 0, t);
      WITH_LAYER_OF(slot, (move_tile<L, LOAD>(c, slot - L::FIRST_SLOT, t, flat)))
      if (LOAD) kind == 0 ? w.master.set(i, t) : kind == 1 ? w.state0.set(STATES > 0 ? i : 0, t) : w.state1.set(STATES > 1 ? i : 0, t);
    }
    EACH_LAYER({
      for (u32 unit = threadIdx.x; unit < L::N_TILES * 8; unit += THREADS) {
        const bool real = L::BIAS && unit < L::OUT;
        const u32 at = c.shared + AT_BIAS + (kind * ALL_UNITS + L::UNIT_AT + unit) * 4;
        if (LOAD) store_float(at, real ? flat[L::BIAS_AT + unit] : 0.f);
        else if (real && c.rank == 0) flat[L::BIAS_AT + unit] = load_float(at);
      }
    })
  }
}
INLINE void copy_all(const Context& c, const OwnWeights& w, u32 count) {
#pragma unroll
  for (int i = 0; i < OwnWeights::N; ++i) {
    const int slot = i * BLOCKS + c.rank;
    float t[4];
    w.master.get(i, t);
    WITH_LAYER_OF(slot, (copy_tile<L>(c, count, slot - L::FIRST_SLOT, t)))
  }
}

// With one block and one pass per step, a tile is updated as soon as its gradient is complete. A group of tiles is computed
// together, so that their latencies overlap; its optimizer state is read before the products.
template <class L, class Read> INLINE void update_layer(const Context& c, OwnWeights& w, const Rates& rates, const Rule& rule, Read read) {
  constexpr bool SAME_K_TILE = L::N_TILES % L::SLOTS == 0;  // all tiles of the warp have the same inputs
  constexpr int TILES = L::SLOTS < TILES_AT_ONCE ? L::SLOTS : TILES_AT_ONCE, PAIR = SAME_K_TILE && L::SLOTS % 2 == 0 && TILES % 2 == 0 ? 2 : 1;  // neighbours, read at once
  constexpr bool AHEAD = FREE_REGISTERS >= 100;  // read the next group's state while this one is computed
  States<TILES> states, next;
  if constexpr (AHEAD) states.read(w, L::FIRST_SLOT, L::SLOTS);
#pragma unroll
  for (int first = 0; first < L::SLOTS; first += TILES) {
    float gradient[TILES][4];
    if constexpr (!AHEAD) states.read(w, L::FIRST_SLOT + first, L::SLOTS - first);
    else if (first + TILES < L::SLOTS) next.read(w, L::FIRST_SLOT + first + TILES, L::SLOTS - first - TILES);
#pragma unroll
    for (int i = 0; i < TILES; ++i) clear(gradient[i]);
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
    for (int m = 0; m < ROW_TILES; ++m) {
      u32 left[L::IN_PLANES][4];
#pragma unroll
      for (int i = 0; i < TILES; i += PAIR) {
        const int tile = tile_of<L>(c, first + i), k_tile = tile / L::N_TILES, n = tile % L::N_TILES;
        if (first + i >= L::SLOTS || !is_tile<L>(tile)) break;
        if (i == 0 || !SAME_K_TILE)
#pragma unroll
          for (int plane = 0; plane < L::IN_PLANES; ++plane) read(m, k_tile, plane, left[plane]);
#pragma unroll
        for (int right = 0; right < PLANES; ++right) {
          u32 delta[PAIR * 2];
          load_transposed(unit_tile_at<L>(c, L::AT_DELTA, right, m, n) + (c.lane & (PAIR * 16 - 1)) * 16, delta);
#pragma unroll
          for (int plane = 0; plane < L::IN_PLANES; ++plane)
#pragma unroll
            for (int j = 0; j < PAIR; ++j)
              if (plane + right < PLANES) multiply_add(gradient[i + j], left[plane], delta[j * 2], delta[j * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (first + i < L::SLOTS) {
        float weight[4];
        step_tile(w, L::FIRST_SLOT + first + i, states, i, gradient[i], L::GRADIENT_SCALE, weight, rates, rule);
        copy_tile<L>(c, 0, first + i, weight);
      }
    if constexpr (AHEAD) states = next;
  }
}
INLINE void update_biases(const Context& c, const Rates& rates, const Rule& rule) {
  for (u32 unit = THREADS - 1 - threadIdx.x; unit < ALL_UNITS * HAS_BIASES; unit += THREADS) {
    if (!has_bias(unit)) continue;
    const u32 at = c.shared + AT_BIAS + unit * 4;
    float sum = 0.f, bias = load_float(at), s0 = 0.f, s1 = 0.f;
#pragma unroll 8
    for (int m = 0; m < ROW_TILES; ++m) sum += load_float(c.shared + AT_BIAS_SUMS + (m * ALL_UNITS + unit) * 4);
    if constexpr (STATES > 0) s0 = load_float(at + ALL_UNITS * 4);
    if constexpr (STATES > 1) s1 = load_float(at + 2 * ALL_UNITS * 4);
    step_weight(bias, sum * BIAS_SCALE, s0, s1, rates, rule);
    store_float(at, bias);
    if constexpr (STATES > 0) store_float(at + ALL_UNITS * 4, s0);
    if constexpr (STATES > 1) store_float(at + 2 * ALL_UNITS * 4, s1);
  }
}

// Sends this block's partial sums to the owners of the tiles, each layer as soon as it is finished.
INLINE u32 part_at(int slot, u32 warp, u32 from) { return AT_PARTS + (((slot / BLOCKS) * WARPS + warp) * BLOCKS + from) * 512; }
// Two buffers in turn: a block that has all new copies may send its next parts while another block still reads.
INLINE u32 bias_part_at(const Context& c, u32 from) { return AT_BIAS_PARTS + ((c.step & 1) * BLOCKS + from) * ALL_UNITS * 4; }
template <class L> INLINE void send_parts(const Context& c, const float (&gradient)[ALL_SLOTS][4]) {
#if IS_CLUSTER
  if (stays_silent(c)) return;
  const u32 barrier = AT_BARRIERS + (PARTS * 2 + (c.step & 1)) * 8;
#pragma unroll
  for (int i = 0; i < L::SLOTS; ++i) {
    const int slot = L::FIRST_SLOT + i;
    const u32 there = at_block(c.shared, slot % BLOCKS);
    const u32 words[4] = {__float_as_uint(gradient[slot][0]), __float_as_uint(gradient[slot][1]), __float_as_uint(gradient[slot][2]), __float_as_uint(gradient[slot][3])};
    send(there + part_at(slot, c.warp, c.rank) + c.lane * 16, words, there + barrier);
  }
#endif
}
// The block's deltas summed by unit over its row tiles and micro-batches, four units per item. After the last micro-batch they go to
// all blocks, one warp per receiver: packets of neighbouring lanes travel together.
INLINE void sum_biases(const Context& c, bool first, bool last) {
  for (u32 receiver = c.warp; receiver < (last ? BLOCKS : 1) * HAS_BIASES; receiver += WARPS)
    for (u32 item = c.lane; item < ALL_UNITS / 4; item += 32) {
      const u32 at = c.shared + AT_BIAS_TOTALS + item * 16;
      float sum[4] = {0.f, 0.f, 0.f, 0.f}, part[4];
      if (!first) load_shared(at, sum);
#pragma unroll 4
      for (int m = 0; m < ROW_TILES; ++m) {
        load_shared(c.shared + AT_BIAS_SUMS + (m * ALL_UNITS + item * 4) * 4, part);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part[e];
      }
      if (BLOCKS == 1 || !last) store_shared(at, sum);
#if IS_CLUSTER
      if (last && !stays_silent(c)) {
        const u32 there = at_block(c.shared, receiver);
        const u32 words[4] = {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
        send(there + bias_part_at(c, c.rank) + item * 16, words, there + AT_BARRIERS + (PARTS * 2 + (c.step & 1)) * 8);
      }
#endif
    }
}
// Loss and correct predictions of a step in block 0, one entry per row tile of each block; two buffers in turn.
INLINE u32 score_at(const Context& c, u32 from, u32 m) { return AT_SCORES + (((c.step & 1) * BLOCKS + from) * ROW_TILES + m) * 16; }
INLINE void send_score(const Context& c, const Score& score) {
  const u32 m = c.warp / TEAM;
  if (member(c) != 0 || m >= ROW_TILES) return;
  const Score sum = score.of_warp();
  if (c.lane != 0) return;
  if constexpr (BLOCKS == 1) store_shared(c.shared + score_at(c, 0, m), __float_as_uint(sum.loss), sum.correct);
#if IS_CLUSTER
  const u32 words[4] = {__float_as_uint(sum.loss), sum.correct, 0, 0}, there = at_block(c.shared, 0);
  if (!stays_silent(c)) send(there + score_at(c, c.rank, m), words, there + AT_BARRIERS + (PARTS * 2 + (c.step & 1)) * 8);
#endif
}
INLINE float add_scores(const Context& c) {  // thread 0 of block 0
  float loss = 0.f;
  u32 correct = load_word(c.shared + AT_CORRECT);
  for (u32 i = 0; i < BLOCKS * ROW_TILES; ++i) {
    loss += load_float(c.shared + score_at(c, 0, i));
    correct += load_word(c.shared + score_at(c, 0, i) + 4);
  }
  store_word(c.shared + AT_CORRECT, correct);
  return loss;
}
INLINE void step_own(const Context& c, OwnWeights& w, const float (&gradient)[ALL_SLOTS][4], const Rates& rates, const Rule& rule) {
#pragma unroll
  for (int i = 0; i < OwnWeights::N; ++i) {
    const int slot = i * BLOCKS + c.rank;
    if (slot >= ALL_SLOTS) break;
    float sum[4], part[4], weight[4];
    if constexpr (BLOCKS == 1) {
      sum[0] = gradient[i][0], sum[1] = gradient[i][1], sum[2] = gradient[i][2], sum[3] = gradient[i][3];
    } else {
      load_shared(c.shared + part_at(slot, c.warp, 0) + c.lane * 16, sum);
#pragma unroll
      for (int from = 1; from < BLOCKS; ++from) {
        load_shared(c.shared + part_at(slot, c.warp, from) + c.lane * 16, part);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part[e];
      }
    }
    WITH_LAYER_OF(slot, (step_tile(w, i, sum, L::GRADIENT_SCALE, weight, rates, rule)))
    WITH_LAYER_OF(slot, (copy_tile<L>(c, c.step + 1, slot - L::FIRST_SLOT, weight)))
  }
  for (u32 unit = threadIdx.x; unit < ALL_UNITS * HAS_BIASES; unit += THREADS) {  // every block has all biases: the same sums, the same bits
    const u32 at = c.shared + AT_BIAS + unit * 4;
    float sum = BLOCKS == 1 ? load_float(c.shared + AT_BIAS_TOTALS + unit * 4) : 0.f, bias = load_float(at), s0 = 0.f, s1 = 0.f;
    if constexpr (BLOCKS > 1)
#pragma unroll
      for (u32 from = 0; from < BLOCKS; ++from) sum += load_float(c.shared + bias_part_at(c, from) + unit * 4);
    if constexpr (STATES > 0) s0 = load_float(at + ALL_UNITS * 4);
    if constexpr (STATES > 1) s1 = load_float(at + 2 * ALL_UNITS * 4);
    step_weight(bias, has_bias(unit) ? sum * BIAS_SCALE : 0.f, s0, s1, rates, rule);
    if (!has_bias(unit)) continue;
    store_float(at, bias);
    if constexpr (STATES > 0) store_float(at + ALL_UNITS * 4, s0);
    if constexpr (STATES > 1) store_float(at + 2 * ALL_UNITS * 4, s1);
  }
}

// For a pass that does not train: stores the score where `sum_of_losses` reads it.
INLINE void keep_score(const Context& c, const Score& score) {
  const Score sum = score.of_warp();
  if (c.lane == 0) {
    store_float(c.shared + AT_LOSSES + c.warp * 4, sum.loss);
    atomicAdd((u32*)__cvta_shared_to_generic(c.shared + AT_CORRECT), sum.correct);
  }
}
// After the last micro-batch of a step: sums the parts of all blocks, updates, and sends new copies. `total`: the sum of all losses, in
// thread 0 of block 0.
INLINE void finish_step(Context& c, OwnWeights& w, const float (&gradient)[ALL_SLOTS][4], const Rates& rates, const Rule& rule, float& total) {
  if constexpr (BLOCKS == 1) __syncthreads();  // for the sums of biases and the scores
  else wait_for<PARTS>(c, c.step, 0, 1);
  step_own(c, w, gradient, rates, rule);
  if (c.rank == 0 && threadIdx.x == 0) total = add_scores(c);
  wait_for<COPIES>(c, c.step + 1, 0, 1);
  __syncthreads();
}
