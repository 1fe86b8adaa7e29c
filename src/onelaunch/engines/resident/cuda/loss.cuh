// The last layer where every block computes it whole: outputs, loss, correct predictions, and the gradient of the loss.
#pragma once
#include "activations.cuh"
#include "last_layer.cuh"

struct Tally {
  u32 rows;  // of this micro-batch that are not padding
  float row_weight;  // of one row (or element) in the mean, times LOSS_SCALE
  float smoothing;
  u32 targets;  // shared address; per row a class, or OUTPUTS floats; if WEIGHTED, then its weight
};
// A value times the weight of its row, where rows have weights.
INLINE float weighted(float value, const Tally& tally, u32 row) {
  if constexpr (WEIGHTED) return value * load_float(tally.targets + (row * TARGET_WORDS + TARGET_WORDS - 1) * 4);
  return value;
}

// A lane's part of a row's loss, without the row's weight, and of its correct predictions. Cross-entropy leaves some work to
// `settle`, which can run while the gradient is in flight.
struct Result {
  float loss;
  u32 correct;
  float total;  // of the exponentials
  u32 first, label;  // the lane's first class with the largest output; the target class
};
INLINE float exponential(float v) {
  if constexpr (PLANES > 1) return expf(v);
  return exp2_of(v * LOG2_E);
}
INLINE float logarithm(float v) { return PLANES == 1 ? __logf(v) : logf(v); }

// How the outputs of a row are spread over lanes, COUNT per lane. Over a quad, as in accumulators:
template <int N_TILES> struct Quad {
  static constexpr int COUNT = N_TILES * 2;
  float (&z)[N_TILES][2];
  u32 q;
  INLINE float& value(int i) const { return z[i / 2][i & 1]; }
  INLINE u32 unit(int i) const { return i / 2 * 8 + q * 2 + (i & 1); }
  INLINE bool leads() const { return q == 0; }
  INLINE static float largest_over_row(float v) { return quad_max(v); }
  INLINE static float sum_over_row(float v) { return quad_sum(v); }
  INLINE static u32 smallest_over_row(u32 v) {
    v = min(v, __shfl_xor_sync(~0u, v, 1));
    return min(v, __shfl_xor_sync(~0u, v, 2));
  }
};
// Over 16 lanes, and a second time over the other 16. Integer reductions take a fifth of the time of four shuffles, so floats are
// compared as integers of the same order, and exponentials (at most COUNT per lane) are added in units of 2^-25.
template <int N_TILES> struct HalfWarp {
  static constexpr int COUNT = N_TILES / 2;
  float (&z)[COUNT];
  u32 lane;
  INLINE float& value(int i) const { return z[i]; }
  INLINE u32 unit(int i) const { return i * 16 + (lane & 15); }
  INLINE bool leads() const { return (lane & 15) == 0; }
  INLINE static int ordered(int v) { return v ^ ((v >> 31) & 0x7fffffff); }
  INLINE static float largest_over_row(float v) { return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(v))))); }
  INLINE float sum_over_row(float v) const { return (float)__reduce_add_sync(~0u, lane < 16 ? __float2uint_rn(v * 33554432.f) : 0u) * (1.f / 33554432.f); }
  INLINE static u32 smallest_over_row(u32 v) { return __reduce_min_sync(~0u, v); }
};

// The loss of a row; replaces the outputs by the gradient.
template <class Row> INLINE Result row_loss(const Row& row, u32 target, float smoothing, float weight) {
  Result result = {0.f, 0, 1.f, 0, 0};
  if constexpr (LOSS == CROSS_ENTROPY) {
    const u32 label = load_word(target);
    const float none = __int_as_float(0xff800000);  // minus infinity, whose exponential is 0
    float most = none, total = 0.f, chosen = 0.f, all = 0.f;
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      row.value(i) = row.unit(i) < OUTPUTS ? row.value(i) : none;
      most = fmaxf(most, row.value(i));
    }
    most = row.largest_over_row(most);
    u32 first = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      const u32 unit = row.unit(i);
      first = value == most && unit < first ? unit : first;
      const float below = unit < OUTPUTS ? value - most : none;
      chosen = unit == label ? below : chosen;
      if (LABEL_SMOOTHING) all += unit < OUTPUTS ? below : 0.f;
      value = exponential(below);
      total += value;
    }
    total = row.sum_over_row(total);
    const float inverse = weight * reciprocal(total);
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      value = row.unit(i) < OUTPUTS ? value * inverse - weight * ((row.unit(i) == label ? 1.f - smoothing : 0.f) + (LABEL_SMOOTHING ? smoothing / OUTPUTS : 0.f)) : 0.f;
    }
    result.loss = -(1.f - smoothing) * chosen - (LABEL_SMOOTHING ? smoothing / OUTPUTS * all : 0.f);
    result.total = total, result.first = first, result.label = label;
  } else {
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      const bool real = row.unit(i) < OUTPUTS;
      const float expected = real ? load_float(target + row.unit(i) * 4) : 0.f;
      if constexpr (LOSS == MSE) {
        const float off = real ? value - expected : 0.f;
        result.loss = fmaf(off, off, result.loss);
        value = 2.f * weight * off;
      } else {
        if (real) {
          result.loss += fmaxf(value, 0.f) - value * expected + log1pf(expf(-fabsf(value)));
          result.correct += (value > 0.f) == (expected > 0.5f);
        }
        value = real ? weight * (sigmoid_of(value) - expected) : 0.f;
      }
    }
  }
  return result;
}
template <class Row> INLINE void settle(const Row& row, Result& result) {
  if constexpr (LOSS == CROSS_ENTROPY) {
    result.loss += row.leads() ? logarithm(result.total) : 0.f;
    result.correct = row.smallest_over_row(result.first) == result.label && row.leads();
  }
}

// One over the rows (or elements) of this step, or over their summed weights. It is read when needed, because registers are few.
INLINE float row_weight(const Context& c) { return load_float(c.shared + AT_RATES + c.step % INTERVAL * 16 + 12); }

// Outputs and loss of a pass; `multiply` gives the sums of a group. Afterwards, and after one more barrier of the block, the sums of
// the loss are at AT_LOSSES, one float per warp, and the correct predictions have been added at AT_CORRECT.
template <class L, class Multiply> INLINE void outputs(Context& c, const Draw& draw, const Tally& tally, Multiply multiply) {
  constexpr int PARTS = ROW_TILES_AT_ONCE * 2, FIRST_WARP = LOSS_WARPS < WARPS ? WARPS - LOSS_WARPS : 0;  // the last warps take eight rows each
  float loss = 0.f;
  u32 correct = 0;
  for (int group = 0; group < ROW_TILES / ROW_TILES_AT_ONCE; ++group) {
    float sum[ROW_TILES_AT_ONCE][L::N_TILES][4];
    multiply(group, sum);
    const u32 buffer = store_partials<L::N_TILES, L::SPLIT_K>(c, sum);
#pragma unroll
    for (int first = 0; first < PARTS; first += WARPS) {
      const int part = first + (int)c.warp - FIRST_WARP;
      if (part < 0 || part >= PARTS) break;
      const int m = part >> 1, half = part & 1, row_tile = group * ROW_TILES_AT_ONCE + m;
      const u32 row = row_tile * 16 + half * 8 + c.g;
      float z[L::N_TILES][2], slope[L::N_TILES][2];
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) {
        float bias[2];
        load_shared(c.shared + L::AT_BIAS + (n * 8 + c.q * 2) * 4, bias);
        add_partials<L::SPLIT_K>(c, buffer, m * L::N_TILES + n, L::N_TILES, half, z[n][0], z[n][1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          slope[n][e] = 1.f;
          z[n][e] = fmaf(z[n][e], L::INPUT_SCALE, bias[e]);
        }
        L::chain(z[n], slope[n], draw, draw.row + row, n * 8);
      }
      const bool real = row < tally.rows;
      Result result = row_loss(Quad<L::N_TILES>{z, c.q}, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real && draw.training ? weighted(row_weight(c) * LOSS_SCALE, tally, row) : 0.f);
      settle(Quad<L::N_TILES>{z, c.q}, result);
      loss += real ? weighted(result.loss, tally, row) : 0.f;
      correct += real ? result.correct : 0;
      if (draw.training)
#pragma unroll
        for (int n = 0; n < L::N_TILES; ++n) {
          u32 words[1][PLANES];
#pragma unroll
          for (int e = 0; e < 2; ++e) z[n][e] = real ? z[n][e] * slope[n][e] : 0.f;  // not a multiplication by 0: an overflow times 0 is NaN
          split(z[n][0], z[n][1], words[0]);
          keep_delta<L>(c, row_tile, n, half, z[n], words);
        }
    }
  }
  c.dead = __syncthreads_or(c.dead);
  if ((int)c.warp >= FIRST_WARP) {  // the other warps go on; the result is read after the next barrier
    loss = column_sum(quad_sum(loss));
    correct = __reduce_add_sync(~0u, correct);
    if (c.lane == 0) {
      store_float(c.shared + AT_LOSSES + (c.warp - FIRST_WARP) * 4, loss);
      atomicAdd((u32*)__cvta_shared_to_generic(c.shared + AT_CORRECT), correct);
    }
  }
}
