// The last layer, which every block computes whole: outputs, loss, right predictions, and the loss's gradient.
#pragma once
#include "last_layer.cuh"

struct Tally {
  u32 rows;          // of this micro-batch that are real
  float row_weight;  // of one row (or element) in the mean, times the scale that keeps fp16 gradients in range
  float smoothing;
  u32 targets;       // shared address: a class, or OUTPUTS floats, a row
};

// A lane's part of a row's loss, before the weight, and of its right predictions. Cross-entropy leaves a part of the work to `settle`,
// which can be done when the gradient is on its way.
struct Result {
  float loss;
  u32 right;
  float total;       // of the exponentials
  u32 first, label;  // the first class in this lane that has the largest output; the right one
};
INLINE float exponential(float v) {
  if constexpr (PLANES > 1) return expf(v);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v * 1.44269504f));
  return power;
}
INLINE float reciprocal(float v) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
  return inverse;
}
INLINE float logarithm(float v) { return PLANES == 1 ? __logf(v) : logf(v); }

// How a row's outputs are spread: a lane has COUNT of them. Over a quad, as accumulators have it:
template <int NT> struct Quad {
  static constexpr int COUNT = NT * 2;
  float (&z)[NT][2];
  u32 q;
  INLINE float& value(int i) const { return z[i / 2][i & 1]; }
  INLINE u32 unit(int i) const { return i / 2 * 8 + q * 2 + (i & 1); }
  INLINE bool leads() const { return q == 0; }
  INLINE static float most(float v) { return quad_max(v); }
  INLINE static float sum_of_shares(float v) { return quad_sum(v); }
  INLINE static u32 least(u32 v) {
    v = min(v, __shfl_xor_sync(~0u, v, 1));
    return min(v, __shfl_xor_sync(~0u, v, 2));
  }
};
// Over 16 lanes, and once more over the other 16. Integers are reduced in a fifth of the time of four shuffles: floats are compared
// as integers of the same order, and shares (at most COUNT a lane) are added in units of 2^-25.
template <int NT> struct HalfWarp {
  static constexpr int COUNT = NT / 2;
  float (&z)[COUNT];
  u32 lane;
  INLINE float& value(int i) const { return z[i]; }
  INLINE u32 unit(int i) const { return i * 16 + (lane & 15); }
  INLINE bool leads() const { return (lane & 15) == 0; }
  INLINE static int ordered(int v) { return v ^ ((v >> 31) & 0x7fffffff); }
  INLINE static float most(float v) { return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(v))))); }
  INLINE float sum_of_shares(float v) const { return (float)__reduce_add_sync(~0u, lane < 16 ? __float2uint_rn(v * 33554432.f) : 0u) * (1.f / 33554432.f); }
  INLINE static u32 least(u32 v) { return __reduce_min_sync(~0u, v); }
};

// A row's gradient in its values.
template <class Row> INLINE Result row_loss(const Row& row, u32 target, float smoothing, float weight) {
  Result result = {0.f, 0, 1.f, 0, 0};
  if constexpr (LOSS == CROSS_ENTROPY) {
    const u32 label = load_word(target);
    const float none = __int_as_float(0xff800000);  // -infinity, whose exponential is 0
    float most = none, total = 0.f, chosen = 0.f, all = 0.f;
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      row.value(i) = row.unit(i) < OUTPUTS ? row.value(i) : none;
      most = fmaxf(most, row.value(i));
    }
    most = row.most(most);
    u32 first = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      const u32 unit = row.unit(i);
      first = value == most && unit < first ? unit : first;
      const float below = unit < OUTPUTS ? value - most : none;
      chosen = unit == label ? below : chosen;
      if (SMOOTHS) all += unit < OUTPUTS ? below : 0.f;
      value = exponential(below);
      total += value;
    }
    total = row.sum_of_shares(total);
    const float inverse = weight * reciprocal(total);
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      value = row.unit(i) < OUTPUTS ? value * inverse - weight * ((row.unit(i) == label ? 1.f - smoothing : 0.f) + (SMOOTHS ? smoothing / OUTPUTS : 0.f)) : 0.f;
    }
    result.loss = -(1.f - smoothing) * chosen - (SMOOTHS ? smoothing / OUTPUTS * all : 0.f);
    result.total = total, result.first = first, result.label = label;
  } else {
#pragma unroll
    for (int i = 0; i < Row::COUNT; ++i) {
      float& value = row.value(i);
      const bool real = row.unit(i) < OUTPUTS;
      const float wanted = real ? load_float(target + row.unit(i) * 4) : 0.f;
      if constexpr (LOSS == MSE) {
        const float off = real ? value - wanted : 0.f;
        result.loss = fmaf(off, off, result.loss);
        value = 2.f * weight * off;
      } else {
        if (real) {
          result.loss += fmaxf(value, 0.f) - value * wanted + log1pf(expf(-fabsf(value)));
          result.right += (value > 0.f) == (wanted > 0.5f);
        }
        value = real ? weight * (sigmoid_of(value) - wanted) : 0.f;
      }
    }
  }
  return result;
}
template <class Row> INLINE void settle(const Row& row, Result& result) {
  if constexpr (LOSS == CROSS_ENTROPY) {
    result.loss += row.leads() ? logarithm(result.total) : 0.f;
    result.right = row.least(result.first) == result.label && row.leads();
  }
}

// One over the rows (or elements) of this step; read when it is needed, where registers are few.
INLINE float row_weight(const Context& c) { return load_float(c.shared + AT_RATES + c.step % INTERVAL * 16 + 12); }

// Outputs and loss of a pass; `multiply` gives a group's sums. Afterwards, and after one more barrier of the
// block, the loss's sums lie at AT_LOSSES, a float a warp, and right predictions are added at AT_CORRECT.
template <class L, class Multiply> INLINE void outputs(Context& c, const Draw& draw, const Tally& tally, Multiply multiply) {
  constexpr int PARTS = GROUP_TILES * 2, FIRST_WARP = LOSS_WARPS < WARPS ? WARPS - LOSS_WARPS : 0;  // a warp takes eight rows, the last ones do
  float loss = 0.f;
  u32 right = 0;
  for (int group = 0; group < ROW_TILES / GROUP_TILES; ++group) {
    float sum[GROUP_TILES][L::NT][4];
    multiply(group, sum);
    const u32 buffer = store_partials<L::NT, L::SPLIT>(c, sum);
#pragma unroll
    for (int first = 0; first < PARTS; first += WARPS) {
      const int part = first + (int)c.warp - FIRST_WARP;
      if (part < 0 || part >= PARTS) break;
      const int m = part >> 1, half = part & 1, row_tile = group * GROUP_TILES + m;
      const u32 row = row_tile * 16 + half * 8 + c.g;
      float z[L::NT][2], slope[L::NT][2];
#pragma unroll
      for (int n = 0; n < L::NT; ++n) {
        float bias[2];
        load_shared(c.shared + L::AT_BIAS + (n * 8 + c.q * 2) * 4, bias);
        add_partials<L::SPLIT>(c, buffer, m * L::NT + n, L::NT, half, z[n][0], z[n][1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          slope[n][e] = 1.f;
          z[n][e] = fmaf(z[n][e], L::INPUT_SCALE, bias[e]);
        }
        L::chain(z[n], slope[n], draw, draw.row + row, n * 8);
      }
      const bool real = row < tally.rows;
      Result result = row_loss(Quad<L::NT>{z, c.q}, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real && draw.training ? row_weight(c) * LOSS_SCALE : 0.f);
      settle(Quad<L::NT>{z, c.q}, result);
      loss += real ? result.loss : 0.f;
      right += real ? result.right : 0;
      if (draw.training)
#pragma unroll
        for (int n = 0; n < L::NT; ++n) {
          u32 words[1][PLANES];
#pragma unroll
          for (int e = 0; e < 2; ++e) z[n][e] = real ? z[n][e] * slope[n][e] : 0.f;  // 0 times an overflow is not 0
          split(z[n][0], z[n][1], words[0]);
          keep_delta<L>(c, row_tile, n, half, z[n], words);
        }
    }
  }
  c.dead = __syncthreads_or(c.dead);
  if ((int)c.warp >= FIRST_WARP) {  // while the others go on; read after the next barrier
    loss = column_sum(quad_sum(loss));
    right = __reduce_add_sync(~0u, right);
    if (c.lane == 0) {
      store_float(c.shared + AT_LOSSES + (c.warp - FIRST_WARP) * 4, loss);
      atomicAdd((u32*)__cvta_shared_to_generic(c.shared + AT_CORRECT), right);
    }
  }
}
