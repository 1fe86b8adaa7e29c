// The placement for small networks with many rows: every block has the whole network and a share of the rows.
//
// A warp takes tiles of 16 rows through all layers and back in its registers: a packed accumulator is the next product's left
// operand, forward and backward, and the one half-precision copy of the weights in shared memory serves both, read as it is or
// transposed. Values and deltas are set down for the weights' gradient, which the block's warps then share out tile by tile.
// Blocks send their partial tiles to the tile's owner, which adds them in the order of the blocks, updates its fp32 master and
// gives everyone the new copy.
#pragma once
#include "train.cuh"

// Layer L's copy: [plane][tile of outputs][tile of inputs], eight outputs of 16 bytes (eight inputs) each.
template <class L> INLINE u32 copy_at(const Context& c, int plane, int n, int input_tile) {
  return c.shared + L::AT_COPIES + ((plane * L::NT + n) * (L::KT * 2) + input_tile) * 128;
}
// As right operands: k are the inputs of a step, or the outputs of tiles 2 * step and 2 * step + 1.
template <class L> INLINE void forward_right(const Context& c, int plane, int n, int step, u32 (&w)[2]) {
  load_matrices(copy_at<L>(c, plane, n, step * 2) + (c.lane & 15) * 16, w);
}
template <class L> INLINE void backward_right(const Context& c, int plane, int step, int input_tile, u32 (&w)[2]) {
  load_transposed(copy_at<L>(c, plane, step * 2 + ((c.lane >> 3) & 1), input_tile) + (c.lane & 7) * 16, w);
}
// Values or deltas of the block's rows: [plane][row tile][tile of units], 16 rows of 16 bytes.
template <int AT, int NT> INLINE void set_down(const Context& c, int m, int n, const u32 (&upper)[PLANES], const u32 (&lower)[PLANES]) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    const u32 at = c.shared + AT + ((plane * ROW_TILES + m) * NT + n) * 256 + c.lane * 4;
    store_word(at, upper[plane]);
    store_word(at + 128, lower[plane]);
  }
}
template <class L> INLINE u32 tile_slope_at(const Context& c, int m, int n) { return c.shared + L::AT_SLOPE + ((m * L::NT + n) * 32 + c.lane) * 16; }

// Sums of one tile of units: the left operand of all steps times the weights. `read(step, plane, left)`.
template <class L, int TILES, class Read> INLINE void tile_sums(const Context& c, int first, float (&sum)[TILES][4], Read read) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) clear(sum[n]);
#pragma unroll(L::KT <= 8 ? L::KT : 2)
  for (int step = 0; step < L::KT; ++step) {
    u32 left[L::IN_PLANES][4];
#pragma unroll
    for (int plane = 0; plane < L::IN_PLANES; ++plane) read(step, plane, left[plane]);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 words[2];
        forward_right<L>(c, right, first + n, step, words);
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane)
          if (plane + right < PLANES) multiply_add(sum[n], left[plane], words[0], words[1]);
      }
  }
}
// Bias and chain of a tile; slope becomes the derivative by the sums, 0 beyond the layer's units.
template <class L> INLINE void finish_tile(const Context& c, const Draw& draw, u32 row, int n, float (&z)[4], float (&slope)[4]) {
  float bias[2];
  load_shared(c.shared + AT_BIAS + (L::UNIT_AT + n * 8 + c.q * 2) * 4, bias);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    z[e] = fmaf(z[e], L::INPUT_SCALE, bias[e & 1]);
    slope[e] = 1.f;
  }
  L::chain(z, slope, draw, row, n * 8);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (n * 8 + c.q * 2 + (e & 1) >= L::OUT) z[e] = slope[e] = 0.f;
}
// A row tile through a hidden layer; `out` is the next layer's left operand.
template <class L, class Read> INLINE void tile_forward(const Context& c, const Draw& draw, int m, u32 (&out)[PLANES][L::NT / 2][4], Read read) {
  constexpr int TILES = L::NT % CHUNK == 0 ? CHUNK : L::NT % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int first = 0; first < L::NT; first += TILES) {
    float sum[TILES][4];
    tile_sums<L, TILES>(c, first, sum, read);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int n = first + i;
      float slope[4];
      u32 upper[PLANES], lower[PLANES];
      finish_tile<L>(c, draw, draw.row + m * 16 + c.g, n, sum[i], slope);
      if (draw.training) store_shared(tile_slope_at<L>(c, m, n), slope);
      split(sum[i][0], sum[i][1], upper);
      split(sum[i][2], sum[i][3], lower);
      if (draw.training) set_down<L::AT_VALUES, L::NT>(c, m, n, upper, lower);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) out[plane][n / 2][(n & 1) * 2] = upper[plane], out[plane][n / 2][(n & 1) * 2 + 1] = lower[plane];
    }
  }
}
// Deltas of a tile: set down, summed for the bias, and the left operand of what lies before.
template <class L> INLINE void set_down_deltas(const Context& c, int m, int n, const float (&d)[4], u32 (&out)[PLANES][L::NT / 2][4]) {
  u32 upper[PLANES], lower[PLANES];
  split(d[0], d[1], upper);
  split(d[2], d[3], lower);
  set_down<L::AT_DELTA, L::NT>(c, m, n, upper, lower);
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) out[plane][n / 2][(n & 1) * 2] = upper[plane], out[plane][n / 2][(n & 1) * 2 + 1] = lower[plane];
  const float sum0 = column_sum(d[0] + d[2]), sum1 = column_sum(d[1] + d[3]);
  if (c.g == 0) store_shared(c.shared + AT_BIAS_SUMS + (m * UNITS_ALL + L::UNIT_AT + n * 8 + c.q * 2) * 4, sum0, sum1);
}
struct Score {
  float loss;
  u32 right;
};
// Outputs, loss and its gradient of a row tile.
template <class L, class Read> INLINE void tile_outputs(const Context& c, const Draw& draw, const Tally& tally, int m, Score& score, u32 (&out)[PLANES][L::NT / 2][4], Read read) {
  float sum[L::NT][4], slope[L::NT][4];
  tile_sums<L, L::NT>(c, 0, sum, read);
#pragma unroll
  for (int n = 0; n < L::NT; ++n) finish_tile<L>(c, draw, draw.row + m * 16 + c.g, n, sum[n], slope[n]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 row = m * 16 + half * 8 + c.g;
    const bool real = row < tally.rows;
    float z[L::NT][2];
#pragma unroll
    for (int n = 0; n < L::NT; ++n) z[n][0] = sum[n][half * 2], z[n][1] = sum[n][half * 2 + 1];
    const Result result = row_loss<L::NT>(z, c.q, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real ? tally.row_weight : 0.f);
    score.loss += real ? result.loss : 0.f;
    score.right += real ? result.right : 0;
#pragma unroll
    for (int n = 0; n < L::NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[n][half * 2 + e] = real ? z[n][e] * slope[n][half * 2 + e] : 0.f;  // 0 times an overflow is not 0
  }
  if (draw.training)
#pragma unroll
    for (int n = 0; n < L::NT; ++n) set_down_deltas<L>(c, m, n, sum[n], out);
}
// From a layer's deltas to those of the layer before it.
template <class L, class Previous> INLINE void tile_backward(const Context& c, int m, const u32 (&left)[PLANES][L::NT / 2][4], u32 (&out)[PLANES][Previous::NT / 2][4]) {
#pragma unroll
  for (int n = 0; n < Previous::NT; ++n) {
    float d[4], slope[4];
    clear(d);
#pragma unroll
    for (int step = 0; step < L::NT / 2; ++step)
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 words[2];
        backward_right<L>(c, right, step, n, words);
#pragma unroll
        for (int plane = 0; plane + right < PLANES; ++plane) multiply_add(d, left[plane][step], words[0], words[1]);
      }
    load_shared(tile_slope_at<Previous>(c, m, n), slope);
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] *= slope[e];
    set_down_deltas<Previous>(c, m, n, d, out);
  }
}

// The weights' gradient. A layer's tiles (step-major) are dealt to the warps, SLOTS consecutive ones each; slot numbers run through
// all layers, and slot s of every warp belongs to block s % BLOCKS.
template <class L> INLINE int tile_of(const Context& c, int slot) { return c.warp * L::SLOTS + slot; }
template <class L, class Read> INLINE void add_gradient(const Context& c, float (&gradient)[SLOTS_ALL][4], Read read) {
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
  for (int m = 0; m < ROW_TILES; ++m) {
    u32 left[L::IN_PLANES][4];
#pragma unroll
    for (int slot = 0; slot < L::SLOTS; ++slot) {
      const int tile = tile_of<L>(c, slot), step = tile / L::NT, n = tile % L::NT;
      if (tile >= L::KT * L::NT) break;
      if (slot == 0 || L::NT % L::SLOTS != 0)  // else all the warp's tiles have the same inputs
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane) read(m, step, plane, left[plane]);
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 delta[2];
        read_delta<L>(c, right, m, n, delta);
#pragma unroll
        for (int plane = 0; plane < L::IN_PLANES; ++plane)
          if (plane + right < PLANES) multiply_add(gradient[L::FIRST_SLOT + slot], left[plane], delta[0], delta[1]);
      }
    }
  }
}
// The values of layer L as the left operand whose k are the rows.
template <class L> INLINE void read_values_transposed(const Context& c, int m, int step, int plane, u32 (&w)[4]) {
  u32 t[4];
  load_transposed(c.shared + L::AT_VALUES + ((plane * ROW_TILES + m) * L::NT + step * 2) * 256 + c.lane * 16, t);
  w[0] = t[0], w[1] = t[2], w[2] = t[1], w[3] = t[3];
}

struct OwnWeights {  // tiles of slots rank, rank + BLOCKS, …
  static constexpr int N = (SLOTS_ALL + BLOCKS - 1) / BLOCKS;
  Tiles<N, false> master;
  Tiles<(STATES > 0 ? N : 1), STATES_SHARED> state0;
  Tiles<(STATES > 1 ? N : 1), STATES_SHARED> state1;
};
template <class L, bool LOAD> INLINE void move_tile(const Context& c, int slot, float (&t)[4], float* flat) {
  const int tile = tile_of<L>(c, slot), step = tile / L::NT, n = tile % L::NT;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int in = input_of<L>(step, c.g + (e >> 1) * 8), out = n * 8 + c.q * 2 + (e & 1);
    const bool real = tile < L::KT * L::NT && in < L::IN && out < L::OUT;
    float* at = flat + L::WEIGHT_AT + (u64)out * L::IN + in;
    if (LOAD) t[e] = real ? *at : 0.f;
    else if (real) *at = t[e];
  }
}
template <class L> INLINE void copy_tile(const Context& c, u32 count, int slot, const float (&t)[4]) {
  const int tile = tile_of<L>(c, slot), step = tile / L::NT, n = tile % L::NT;
  if (tile >= L::KT * L::NT) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 planes[PLANES];
    split(t[half * 2], t[half * 2 + 1], planes);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
      publish_right<COPIES, L::AT_COPIES, 0>(c, count, (plane * L::NT + n) * (L::KT * 2) + step * 2 + half, transposed(planes[plane]));
  }
}
// The layer a slot belongs to: `act<Layer>(slot within it)`.
#define WITH_LAYER_OF(slot, act) EACH_LAYER(if ((slot) >= L::FIRST_SLOT && (slot) < L::FIRST_SLOT + L::SLOTS) { act; })

template <bool LOAD> INLINE void move_weights(const Context& c, OwnWeights& w) {
  if (LOAD) {
    w.state0.place(c, AT_STATES);
    w.state1.place(c, AT_STATES + OwnWeights::N * THREADS * 16);
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
      for (u32 unit = threadIdx.x; unit < L::NT * 8; unit += THREADS) {
        const bool real = L::BIAS && unit < L::OUT;
        const u32 at = c.shared + AT_BIAS + (kind * UNITS_ALL + L::UNIT_AT + unit) * 4;
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

// Partial sums of this block to the tiles' owners, and of biases and loss to everyone.
INLINE u32 part_at(int slot, u32 warp, u32 from) { return AT_PARTS + (((slot / BLOCKS) * WARPS + warp) * BLOCKS + from) * 512; }
// Two of these in turn: a block that has all new copies may send its next ones while another still reads.
INLINE u32 bias_part_at(const Context& c, u32 from) { return AT_BIAS_PARTS + ((c.step & 1) * BLOCKS + from) * (UNITS_ALL + 4) * 4; }
INLINE void send_parts(const Context& c, const float (&gradient)[SLOTS_ALL][4], float loss, u32 right) {
#if IS_CLUSTER
  if (stays_silent(c)) return;
  const u32 barrier = AT_BARRIERS + (PARTS * 2 + (c.step & 1)) * 8;
#pragma unroll
  for (int slot = 0; slot < SLOTS_ALL; ++slot) {
    const u32 there = at_block(c.shared, slot % BLOCKS);
    const u32 words[4] = {__float_as_uint(gradient[slot][0]), __float_as_uint(gradient[slot][1]), __float_as_uint(gradient[slot][2]), __float_as_uint(gradient[slot][3])};
    send(there + part_at(slot, c.warp, c.rank) + c.lane * 16, words, there + barrier);
  }
  for (u32 i = threadIdx.x; i < UNITS_ALL / 4 + 1; i += THREADS) {
    const bool score = i == 0;  // thread 0 knows it
    u32 words[4] = {__float_as_uint(loss), right, 0, 0};
    if (!score) load_shared(c.shared + AT_BIAS_TOTALS + (i - 1) * 16, words);
#pragma unroll
    for (u32 block = 0; block < BLOCKS; ++block) {
      const u32 there = at_block(c.shared, block);
      send(there + bias_part_at(c, c.rank) + (score ? UNITS_ALL / 4 : i - 1) * 16, words, there + barrier);
    }
  }
#endif
}
// The block's sums by unit, over its row tiles and micro-batches.
INLINE void total_biases(const Context& c, bool first) {
  for (u32 unit = threadIdx.x; unit < UNITS_ALL; unit += THREADS) {
    float sum = first ? 0.f : load_float(c.shared + AT_BIAS_TOTALS + unit * 4);
#pragma unroll 4
    for (int m = 0; m < ROW_TILES; ++m) sum += load_float(c.shared + AT_BIAS_SUMS + (m * UNITS_ALL + unit) * 4);
    store_float(c.shared + AT_BIAS_TOTALS + unit * 4, sum);
  }
}
INLINE void step_own(const Context& c, OwnWeights& w, const float (&gradient)[SLOTS_ALL][4], const Rates& rates, const Rule& rule) {
#pragma unroll
  for (int i = 0; i < OwnWeights::N; ++i) {
    const int slot = i * BLOCKS + c.rank;
    if (slot >= SLOTS_ALL) break;
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
  for (u32 unit = threadIdx.x; unit < UNITS_ALL; unit += THREADS) {  // every block has all biases: the same sums, the same bits
    const u32 at = c.shared + AT_BIAS + unit * 4;
    float sum = BLOCKS == 1 ? load_float(c.shared + AT_BIAS_TOTALS + unit * 4) : 0.f, bias = load_float(at), s0 = 0.f, s1 = 0.f;
    if constexpr (BLOCKS > 1)
#pragma unroll
      for (u32 from = 0; from < BLOCKS; ++from) sum += load_float(c.shared + bias_part_at(c, from) + unit * 4);
    if constexpr (STATES > 0) s0 = load_float(at + UNITS_ALL * 4);
    if constexpr (STATES > 1) s1 = load_float(at + 2 * UNITS_ALL * 4);
    step_weight(bias, has_bias(unit) ? sum * BIAS_SCALE : 0.f, s0, s1, rates, rule);
    if (!has_bias(unit)) continue;
    store_float(at, bias);
    if constexpr (STATES > 0) store_float(at + UNITS_ALL * 4, s0);
    if constexpr (STATES > 1) store_float(at + 2 * UNITS_ALL * 4, s1);
  }
}

// A row tile's part of the loss and the right predictions, of all the warp's rows.
INLINE void add_score(const Context& c, const Draw& draw, Score& score) {
  const float loss = column_sum(quad_sum(score.loss));
  const u32 right = __reduce_add_sync(~0u, score.right);
  if (c.lane == 0) {
    store_float(c.shared + AT_LOSSES + c.warp * 4, loss);
    atomicAdd((u32*)__cvta_shared_to_generic(c.shared + (BLOCKS > 1 && draw.training ? AT_RIGHT : AT_CORRECT)), right);
  }
}
// After a step's last micro-batch: everyone's parts together, the update, and the new copies. `total`: of this block's losses,
// and in block 0 of all afterwards (thread 0).
INLINE void finish_step(Context& c, OwnWeights& w, const float (&gradient)[SLOTS_ALL][4], const Rates& rates, const Rule& rule, float& total) {
  if constexpr (BLOCKS > 1) {
    send_parts(c, gradient, total, load_word(c.shared + AT_RIGHT));
    wait_for<PARTS>(c, c.step, 0, 1);
    if (c.rank == 0 && threadIdx.x == 0) {
      total = 0.f;
      u32 right = load_word(c.shared + AT_CORRECT);
      for (u32 from = 0; from < BLOCKS; ++from) {
        total += load_float(c.shared + bias_part_at(c, from) + UNITS_ALL * 4);
        right += load_word(c.shared + bias_part_at(c, from) + UNITS_ALL * 4 + 4);
      }
      store_word(c.shared + AT_CORRECT, right);
    }
  }
  step_own(c, w, gradient, rates, rule);
  wait_for<COPIES>(c, c.step + 1, 0, 1);
  __syncthreads();
  if (BLOCKS > 1 && threadIdx.x == 0) store_word(c.shared + AT_RIGHT, 0);
}
