// The phases of a pass: products with their epilogues, forward and back.
//
// Every product is split over the warps along its inner dimension; partial sums meet in shared memory and are added in the
// order of the warps, so the same bits come out every time.
#pragma once
#include "weights.cuh"
#include "random.cuh"
#include "activations.cuh"

struct Draw {  // what dropout depends on
  u64 seed;
  u32 step, row;
  bool training;
};

// Store a group's partial sums, meet, and hand each finished tile (row tile within the group, tile of units) to `finish`.
template <int NT, int SPLIT, class Finish> INLINE void reduce(Context& c, const float (&sum)[GROUP_TILES][NT][4], Finish finish) {
  const u32 half = c.shared + AT_PARTIALS + c.turn * PARTIALS_BYTES;
  c.turn ^= 1;
  if (c.warp < SPLIT)
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) store_shared(half + (((c.warp * GROUP_TILES + m) * NT + n) * 32 + c.lane) * 16, sum[m][n]);
  __syncthreads();
#pragma unroll
  for (int first = 0; first < GROUP_TILES * NT; first += WARPS) {
    const int tile = first + c.warp;
    if (tile >= GROUP_TILES * NT) break;
    float total[4], part[4];
    load_shared(half + (tile * 32 + c.lane) * 16, total);
#pragma unroll
    for (int w = 1; w < SPLIT; ++w) {
      load_shared(half + ((w * GROUP_TILES * NT + tile) * 32 + c.lane) * 16, part);
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += part[e];
    }
    finish(tile / NT, tile % NT, total);
  }
}

// The block's outputs of a layer for a group of row tiles: its inputs times the masters. `read(row tile, step, plane)`.
template <class L, class Read> INLINE void multiply(const Context& c, const Weights<L>& w, int group, float (&sum)[GROUP_TILES][L::NT][4], Read read) {
#pragma unroll
  for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
    for (int n = 0; n < L::NT; ++n) clear(sum[m][n]);
#pragma unroll
  for (int ks = 0; ks < L::KS; ++ks)
    if (Weights<L>::mine(c, ks)) {
      u32 left[L::IN_PLANES][GROUP_TILES][4];
#pragma unroll
      for (int plane = 0; plane < L::IN_PLANES; ++plane)
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) read(group * GROUP_TILES + m, ks, plane, left[plane][m]);
#pragma unroll
      for (int n = 0; n < L::NT; ++n) {
        float t[4];
        w.master.get(ks * L::NT + n, t);
        u32 low[PLANES], high[PLANES];
        split(t[0], t[1], low);
        split(t[2], t[3], high);
#pragma unroll
        for (int right = 0; right < PLANES; ++right) {
          const u32 right0 = transposed(low[right]), right1 = transposed(high[right]);
#pragma unroll
          for (int plane = 0; plane < L::IN_PLANES; ++plane)
            if (plane + right < PLANES)
#pragma unroll
              for (int m = 0; m < GROUP_TILES; ++m) multiply_add(sum[m][n], left[plane][m], right0, right1);
        }
      }
    }
}

// Bias, activations and dropout of a hidden layer; its values go to everyone.
template <class L, class Read> INLINE void forward(Context& c, const Weights<L>& w, const Draw& draw, Read read) {
  for (int group = 0; group < ROW_TILES / GROUP_TILES; ++group) {
    float sum[GROUP_TILES][L::NT][4];
    multiply<L>(c, w, group, sum, read);
    reduce<L::NT, L::SPLIT>(c, sum, [&](int m, int n, float (&z)[4]) {
      const int row_tile = group * GROUP_TILES + m;
      const u32 unit = n * 8 + c.q * 2, first = c.rank * L::UNITS;
      const float bias0 = load_float(c.shared + L::AT_BIAS + unit * 4), bias1 = load_float(c.shared + L::AT_BIAS + unit * 4 + 4);
      float slope[4] = {1.f, 1.f, 1.f, 1.f};
      z[0] = fmaf(z[0], L::INPUT_SCALE, bias0), z[1] = fmaf(z[1], L::INPUT_SCALE, bias1);
      z[2] = fmaf(z[2], L::INPUT_SCALE, bias0), z[3] = fmaf(z[3], L::INPUT_SCALE, bias1);
      L::chain(z, slope, draw, draw.row + row_tile * 16 + c.g, first + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (first + unit + (e & 1) >= L::OUT) z[e] = slope[e] = 0.f;
      if (draw.training) store_shared(c.shared + L::AT_SLOPE + ((row_tile * L::NT + n) * 32 + c.lane) * 16, slope);
      u32 upper[PLANES], lower[PLANES];
      split(z[0], z[1], upper);
      split(z[2], z[3], lower);
      const u32 place = c.rank * L::NT + n;
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
        publish_left<L::OUT_EXCHANGE, L::AT_OUT, L::OUT_STRIDE>(c, c.passes, (plane * ROW_TILES + row_tile) * L::OUT_KT + place / 2, place & 1, upper[plane], lower[plane]);
    });
  }
  written<L::OUT_EXCHANGE>(c, c.passes);
}

// A finished tile of the gradient by a hidden layer's sums: kept as a right operand for the weights, summed for the bias, and
// given to everyone where an earlier layer needs it.
template <class L> INLINE void deliver(const Context& c, int row_tile, int n, float (&d)[4]) {
  float slope[4];
  load_shared(c.shared + L::AT_SLOPE + ((row_tile * L::NT + n) * 32 + c.lane) * 16, slope);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] *= slope[e];
  u32 upper[PLANES], lower[PLANES];
  split(d[0], d[1], upper);
  split(d[2], d[3], lower);
  const u32 place = c.rank * L::NT + n;
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    if constexpr (!L::FIRST)
      publish_left<L::DELTA_EXCHANGE, L::AT_ALL_DELTAS, 0>(c, c.backs, (plane * ROW_TILES + row_tile) * L::OUT_KT + place / 2, place & 1, upper[plane], lower[plane]);
    const u32 at = c.shared + L::AT_DELTA + (((plane * ROW_TILES + row_tile) * L::NT + n) * 32 + c.lane) * 8;
    store_shared(at, transposed(upper[plane]), transposed(lower[plane]));
  }
  const float sum0 = column_sum(d[0] + d[2]), sum1 = column_sum(d[1] + d[3]);
  if (c.g == 0) {
    const u32 at = c.shared + L::AT_BIAS_SUMS + (row_tile * L::UNITS + n * 8 + c.q * 2) * 4;
    store_float(at, sum0);
    store_float(at + 4, sum1);
  }
}

// From the gradient of the outputs (in this block's memory) to the deltas of the last hidden layer.
template <class Last, class L> INLINE void back_from_outputs(Context& c) {
#pragma unroll 2
  for (int first = 0; first < ROW_TILES * L::NT; first += WARPS) {
    const int tile = first + c.warp, row_tile = tile / L::NT, n = tile % L::NT;
    if (tile >= ROW_TILES * L::NT) break;
    float sum[4];
    clear(sum);
#pragma unroll
    for (int step = 0; step < Last::OUT_KT; ++step) {
      u32 left[PLANES][4], right[2];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
        load_shared(c.shared + AT_OUTPUT_GRADIENT + (((plane * ROW_TILES + row_tile) * Last::OUT_KT + step) * 32 + c.lane) * 16, left[plane]);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        load_shared(c.shared + Last::AT_BACK + (((plane * L::NT + n) * Last::OUT_KT + step) * 32 + c.lane) * 8, right);
#pragma unroll
        for (int other = 0; other + plane < PLANES; ++other) multiply_add(sum, left[other], right[0], right[1]);
      }
    }
    deliver<L>(c, row_tile, n, sum);
  }
  if constexpr (!L::FIRST) written<L::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (L::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
}

// From a hidden layer's deltas, everyone's, to those of the layer before it.
template <class L, class Previous> INLINE void back(Context& c, bool first_micro_batch) {
  constexpr int STEPS = (L::OUT_KT + WARPS - 1) / WARPS;
  wait_for<L::DELTA_EXCHANGE>(c, c.backs, L::OUT_KT, L::NT);
  if (first_micro_batch && IS_CLUSTER) wait_for<L::BACK_EXCHANGE>(c, c.step, 0, 1);  // in a grid, the deltas' flags cover it
  for (int group = 0; group < ROW_TILES / GROUP_TILES; ++group) {
    float sum[GROUP_TILES][Previous::NT][4];
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
      for (int n = 0; n < Previous::NT; ++n) clear(sum[m][n]);
#pragma unroll
    for (int ks = 0; ks < STEPS; ++ks) {
      const int step = ks * WARPS + c.warp;
      if ((ks + 1) * WARPS <= L::OUT_KT || step < L::OUT_KT) {
        u32 left[PLANES][GROUP_TILES][4];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
          for (int m = 0; m < GROUP_TILES; ++m)
            read_left<L::AT_ALL_DELTAS, 0>(c, c.backs, (plane * ROW_TILES + group * GROUP_TILES + m) * L::OUT_KT + step, left[plane][m]);
#pragma unroll
        for (int n = 0; n < Previous::NT; ++n)
#pragma unroll
          for (int right = 0; right < PLANES; ++right) {
            u32 words[2];
            read_right<L::AT_BACK, L::BACK_BYTES>(c, c.step, (right * Previous::NT + n) * L::OUT_KT + step, words);
#pragma unroll
            for (int plane = 0; plane + right < PLANES; ++plane)
#pragma unroll
              for (int m = 0; m < GROUP_TILES; ++m) multiply_add(sum[m][n], left[plane][m], words[0], words[1]);
          }
      }
    }
    constexpr int SPLIT = L::OUT_KT < WARPS ? L::OUT_KT : WARPS;
    reduce<Previous::NT, SPLIT>(c, sum, [&](int m, int n, float (&d)[4]) { deliver<Previous>(c, group * GROUP_TILES + m, n, d); });
  }
  if constexpr (!Previous::FIRST) written<Previous::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (Previous::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
}
