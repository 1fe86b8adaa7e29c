// The last layer, which every block computes whole: outputs, loss, right predictions, and the loss's gradient.
#pragma once
#include "last_layer.cuh"

struct Tally {
  u32 rows;          // of this micro-batch that are real
  float row_weight;  // of one row (or element) in the mean, times the scale that keeps fp16 gradients in range
  float smoothing;
  u32 targets;       // shared address: a class, or OUTPUTS floats, a row
};

struct Result {
  float loss;  // of the row, before the weight
  u32 right;   // predictions
};
INLINE float exponential(float v) { return PLANES == 1 ? __expf(v) : expf(v); }
INLINE float logarithm(float v) { return PLANES == 1 ? __logf(v) : logf(v); }

// A row spread over a quad: its gradient in `z`. What the loss needs is returned, so that it can be summed later.
template <int NT> INLINE Result row_loss(float (&z)[NT][2], u32 q, u32 target, float smoothing, float weight) {
  Result result = {0.f, 0};
  if constexpr (LOSS == CROSS_ENTROPY) {
    const u32 label = load_word(target);
    float most = -__int_as_float(0x7f800000), total = 0.f, chosen = 0.f, all = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n * 8 + q * 2 + e < OUTPUTS) most = fmaxf(most, z[n][e]);
    most = quad_max(most);
    u32 first = 0xffffffffu;  // the first class that has the largest output
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        if (unit < OUTPUTS) {
          float& value = z[n][e];
          if (value == most && unit < first) first = unit;
          if (unit == label) chosen = value - most;
          all += value - most;
          value = exponential(value - most);
          total += value;
        }
      }
    total = quad_sum(total);
    const float inverse = __fdividef(weight, total);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        float& value = z[n][e];
        value = unit < OUTPUTS ? value * inverse - weight * ((unit == label ? 1.f - smoothing : 0.f) + (SMOOTHS ? smoothing / OUTPUTS : 0.f)) : 0.f;
      }
    // A quad's lanes each hold a part: their sum is the row's loss.
    result.loss = (q == 0 ? logarithm(total) : 0.f) - (1.f - smoothing) * chosen - (SMOOTHS ? smoothing / OUTPUTS * all : 0.f);
    first = min(first, __shfl_xor_sync(~0u, first, 1));
    first = min(first, __shfl_xor_sync(~0u, first, 2));
    result.right = q == 0 && first == label;
  } else {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        float& value = z[n][e];
        const bool real = unit < OUTPUTS;
        const float wanted = real ? load_float(target + unit * 4) : 0.f;
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
      const Result result = row_loss<L::NT>(z, c.q, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real ? tally.row_weight : 0.f);
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
