// The weights of the last layer. A block owns, as fp32 masters, those of its own units of the layer before: what their gradient
// needs it has itself. In a cluster it multiplies by these alone (summed_outputs.cuh). In a grid every block computes all outputs,
// so it needs all of these weights, in half precision.
#pragma once
#include "passes.cuh"

// L: the last layer, H: the one before it. A tile is 16 of the block's inputs by eight outputs; tile i belongs to warp i % WARPS.
template <class L, class H> struct LastWeights : Masters<L, ((H::NT + 1) / 2 * L::NT + WARPS - 1) / WARPS> {
  static constexpr int TILES = (H::NT + 1) / 2 * L::NT, N = (TILES + WARPS - 1) / WARPS;

  template <bool LOAD, class T> INLINE void move(const Context& c, T& tiles, float* flat) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int tile = i * WARPS + c.warp, pair = tile / L::NT, n = tile % L::NT;
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

// Copies of a tile: for the block's own way back (outputs along k), and for everyone's outputs (inputs along k).
template <class L, class H> INLINE void hand_out(const Context& c, u32 count, int tile, const float (&t)[4]) {
  const int pair = tile / L::NT, n = tile % L::NT;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = pair * 2 + half;  // tile of eight inputs
    if (H::NT % 2 && own >= H::NT) continue;
    u32 planes[PLANES];
    split(t[half * 2], t[half * 2 + 1], planes);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      store_word(c.shared + L::AT_BACK + ((plane * H::NT + own) * L::NT + n) * 128 + c.lane * 4, planes[plane]);
      if constexpr (!SUMS_OUTPUTS) publish_right<L::LAST_EXCHANGE, L::AT_COPIES, L::COPIES_BYTES>(c, count, (plane * L::NT + n) * (L::KT * 2) + c.rank * H::NT + own, transposed(planes[plane]));
    }
  }
}
template <class L, class H> INLINE void hand_out_all(const Context& c, const LastWeights<L, H>& w, u32 count) {
#pragma unroll
  for (int i = 0; i < LastWeights<L, H>::N; ++i)
    if (i * WARPS + c.warp < LastWeights<L, H>::TILES) {
      float t[4];
      w.master.get(i, t);
      hand_out<L, H>(c, count, i * WARPS + c.warp, t);
    }
}

// The outputs' sums of a group of row tiles, from everyone's values and the copies. In a grid, the values' flags cover these.
template <class L, class Read> INLINE void multiply_copies(const Context& c, u32 count, int group, float (&sum)[GROUP_TILES][L::NT][4], Read read) {
#pragma unroll
  for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
    for (int n = 0; n < L::NT; ++n) clear(sum[m][n]);
#pragma unroll
  for (int ks = 0; ks < L::KS; ++ks) {
    const int step = ks * WARPS + c.warp;
    if ((ks + 1) * WARPS <= L::KT || step < L::KT) {
      u32 left[PLANES][GROUP_TILES][4];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) read(group * GROUP_TILES + m, ks, plane, left[plane][m]);
#pragma unroll
      for (int n = 0; n < L::NT; ++n)
#pragma unroll
        for (int right = 0; right < PLANES; ++right) {
          u32 words[2];
          read_right<L::AT_COPIES, L::COPIES_BYTES, false>(c, count, ((right * L::NT + n) * L::KT + step) * 2, words);
#pragma unroll
          for (int plane = 0; plane + right < PLANES; ++plane)
#pragma unroll
            for (int m = 0; m < GROUP_TILES; ++m) multiply_add(sum[m][n], left[plane][m], words[0], words[1]);
        }
    }
  }
}

// Gradient of the block's own weights of the last layer, from its own values and the outputs' gradient.
template <class L, class H> INLINE void update_last(Context& c, LastWeights<L, H>& w, const Rates& rates, const Rule& rule, bool first, bool last) {
#pragma unroll
  for (int i = 0; i < LastWeights<L, H>::N; ++i) {
    const int tile = i * WARPS + c.warp, pair = tile / L::NT, n = tile % L::NT;
    if (tile < LastWeights<L, H>::TILES) {
      float gradient[4], weight[4];
      clear(gradient);
      if (MICRO > 1 && !first) w.gradient.get(i, gradient);
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
      for (int m = 0; m < ROW_TILES; ++m) {
        u32 left[PLANES][4], right[2];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
          u32 t[4];
          const u32 at = H::KEEPS_VALUES ? H::AT_OWN + ((plane * ROW_TILES + m) * H::NT + pair * 2) * 256
                                         : slot_offset<H::AT_OUT, H::OUT_STRIDE>(c.passes) + ((plane * ROW_TILES + m) * (H::OUT_KT * 2) + c.rank * H::NT + pair * 2) * 256;
          load_transposed(c.shared + at + c.lane * 16, t);
          const bool whole = H::NT % 2 == 0 || pair * 2 + 1 < H::NT;
          left[plane][0] = t[0], left[plane][1] = whole ? t[2] : 0, left[plane][2] = t[1], left[plane][3] = whole ? t[3] : 0;
        }
#pragma unroll
        for (int other = 0; other < PLANES; ++other) {
          read_delta<L>(c, other, m, n, right);
#pragma unroll
          for (int plane = 0; plane + other < PLANES; ++plane) multiply_add(gradient, left[plane], right[0], right[1]);
        }
      }
      if (MICRO > 1 && !last) {
        w.gradient.set(i, gradient);
        continue;
      }
      step_tile(w, i, gradient, L::GRADIENT_SCALE, weight, rates, rule);
      hand_out<L, H>(c, c.step + 1, tile, weight);
    }
  }
  step_bias<L>(c, rates, rule, first, last);
}
