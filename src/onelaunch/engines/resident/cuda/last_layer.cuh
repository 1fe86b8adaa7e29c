// The weights of the last layer. A block owns, as fp32 masters, those of its own units of the layer before, because it has the
// values that their gradient needs. In a cluster it multiplies by these alone (summed_outputs.cuh). In a grid every block computes
// all outputs, so it needs 16-bit copies of all of these weights.
#pragma once
#include "passes.cuh"

// L: the last layer, H: the layer before it. A tile is 16 of the block's inputs by eight outputs; tile i belongs to warp i % WARPS.
template <class L, class H> struct LastWeights : Masters<L, ((H::N_TILES + 1) / 2 * L::N_TILES + WARPS - 1) / WARPS> {
  static constexpr int TILES = (H::N_TILES + 1) / 2 * L::N_TILES, N = (TILES + WARPS - 1) / WARPS;

  template <bool LOAD, class T> INLINE void move(const Context& c, T& tiles, float* flat) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int tile = i * WARPS + c.warp, pair = tile / L::N_TILES, n = tile % L::N_TILES;
      float t[4];
      if (!LOAD) tiles.get(i, t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = pair * 16 + c.g + (e >> 1) * 8, in = c.rank * H::UNITS + own, out = n * 8 + c.q * 2 + (e & 1);
        const bool real = tile < TILES && own < H::UNITS && in < L::IN && out < L::OUT;
        float* at = flat + L::WEIGHT_AT + (u64)out * L::IN + in;
        if (LOAD) t[e] = real ? *at : 0.f;
        else if (real) *at = t[e];
      }
      if (LOAD) tiles.set(i, t);
    }
  }
  template <bool LOAD> INLINE void move_all(const Context& c) {
    if (LOAD) this->place(c);
    move<LOAD>(c, this->master, c.p->weights);
    if constexpr (STATES > 0) move<LOAD>(c, this->state0, c.p->state[0]);
    if constexpr (STATES > 1) move<LOAD>(c, this->state1, c.p->state[1]);
    move_bias<L, LOAD>(c);
  }
};

// Copies of a tile: for the block's own backward pass (outputs along k), and for every block's outputs (inputs along k).
template <class L, class H> INLINE void send_copies(const Context& c, u32 count, int tile, const float (&t)[4]) {
  const int pair = tile / L::N_TILES, n = tile % L::N_TILES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = pair * 2 + half;  // tile of eight inputs
    if (H::N_TILES % 2 && own >= H::N_TILES) continue;
    u32 planes[PLANES];
    split(t[half * 2], t[half * 2 + 1], planes);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      store_word(c.shared + L::AT_BACK + ((plane * H::N_TILES + own) * L::N_TILES + n) * 128 + c.lane * 4, planes[plane]);
      if constexpr (!SUMS_OUTPUTS) publish_right<L::LAST_EXCHANGE, L::AT_COPIES, L::COPIES_BYTES>(c, count, (plane * L::N_TILES + n) * (L::K_TILES * 2) + c.rank * H::N_TILES + own, transposed(planes[plane]));
    }
  }
}
template <class L, class H> INLINE void send_all_copies(const Context& c, const LastWeights<L, H>& w, u32 count) {
#pragma unroll
  for (int i = 0; i < LastWeights<L, H>::N; ++i)
    if (i * WARPS + c.warp < LastWeights<L, H>::TILES) {
      float t[4];
      w.master.get(i, t);
      send_copies<L, H>(c, count, i * WARPS + c.warp, t);
    }
}

// The sums of the outputs for a group of row tiles, from all values and the copies. In a grid the flags of the values cover both.
template <class L, class Read> INLINE void multiply_copies(const Context& c, u32 count, int group, float (&sum)[ROW_TILES_AT_ONCE][L::N_TILES][4], Read read) {
#pragma unroll
  for (int m = 0; m < ROW_TILES_AT_ONCE; ++m)
#pragma unroll
    for (int n = 0; n < L::N_TILES; ++n) clear(sum[m][n]);
#pragma unroll
  for (int k = 0; k < L::K_TILES_PER_WARP; ++k) {
    const int k_tile = k * WARPS + c.warp;
    if ((k + 1) * WARPS <= L::K_TILES || k_tile < L::K_TILES) {
      u32 left[PLANES][ROW_TILES_AT_ONCE][4];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int m = 0; m < ROW_TILES_AT_ONCE; ++m) read(group * ROW_TILES_AT_ONCE + m, k, plane, left[plane][m]);
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n)
#pragma unroll
        for (int right = 0; right < PLANES; ++right) {
          u32 words[2];
          read_right<L::AT_COPIES, L::COPIES_BYTES, false>(c, count, ((right * L::N_TILES + n) * L::K_TILES + k_tile) * 2, words);
#pragma unroll
          for (int plane = 0; plane + right < PLANES; ++plane)
#pragma unroll
            for (int m = 0; m < ROW_TILES_AT_ONCE; ++m) multiply_add(sum[m][n], left[plane][m], words[0], words[1]);
        }
    }
  }
}

// The gradient of the block's own weights of the last layer, from its own values and the outputs' gradient, and the update.
template <class L, class H> INLINE void update_last(Context& c, LastWeights<L, H>& w, const Rates& rates, const Rule& rule, bool first, bool last) {
#pragma unroll
  for (int i = 0; i < LastWeights<L, H>::N; ++i) {
    const int tile = i * WARPS + c.warp, pair = tile / L::N_TILES, n = tile % L::N_TILES;
    if (tile < LastWeights<L, H>::TILES) {
      float gradient[4], weight[4];
      clear(gradient);
      if (MICRO_BATCHES > 1 && !first) w.gradient.get(i, gradient);
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
      for (int m = 0; m < ROW_TILES; ++m) {
        u32 left[PLANES][4], right[2];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
          u32 t[4];
          const u32 at = H::KEEPS_VALUES ? H::AT_OWN + ((plane * ROW_TILES + m) * H::N_TILES + pair * 2) * 256
                                         : slot_offset<H::AT_OUT, H::OUT_STRIDE>(c.passes) + ((plane * ROW_TILES + m) * (H::NEXT_K_TILES * 2) + c.rank * H::N_TILES + pair * 2) * 256;
          load_transposed(c.shared + at + c.lane * 16, t);
          const bool whole = H::N_TILES % 2 == 0 || pair * 2 + 1 < H::N_TILES;
          left[plane][0] = t[0], left[plane][1] = whole ? t[2] : 0, left[plane][2] = t[1], left[plane][3] = whole ? t[3] : 0;
        }
#pragma unroll
        for (int other = 0; other < PLANES; ++other) {
          read_delta<L>(c, other, m, n, right);
#pragma unroll
          for (int plane = 0; plane + other < PLANES; ++plane) multiply_add(gradient, left[plane], right[0], right[1]);
        }
      }
      if (MICRO_BATCHES > 1 && !last) {
        w.gradient.set(i, gradient);
        continue;
      }
      step_tile(w, i, gradient, L::GRADIENT_SCALE, weight, rates, rule);
      send_copies<L, H>(c, c.step + 1, tile, weight);
    }
  }
  step_bias<L>(c, rates, rule, first, last);
}
