// The last layer, which every block computes whole: outputs, loss, right predictions, and the loss's gradient.
#pragma once
#include "passes.cuh"

struct Tally {
  u32 rows;          // of this micro-batch that are real
  float row_weight;  // of one row (or element) in the mean, times the scale that keeps fp16 gradients in range
  float smoothing;
  const u32* targets;
  u32 row_table;     // shared address of the rows' numbers, or 0: they are `first_row` and what follows
  u64 first_row;
};

// Row g + 8 * half of a tile: its loss (before the weight), its gradient in `z`, whether the prediction is right.
template <int NT> INLINE float row_loss(float (&z)[NT][4], int half, u32 q, const u32* target, float smoothing, float weight, u32& right) {
  float loss = 0.f;
  if constexpr (LOSS == CROSS_ENTROPY) {
    const u32 label = *target;
    float most = -__int_as_float(0x7f800000), total = 0.f, chosen = 0.f, all = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n * 8 + q * 2 + e < OUTPUTS) most = fmaxf(most, z[n][half * 2 + e]);
    most = quad_max(most);
    u32 first = 0xffffffffu;  // the first class that has the largest output
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        if (unit < OUTPUTS) {
          float& value = z[n][half * 2 + e];
          if (value == most && unit < first) first = unit;
          if (unit == label) chosen = value - most;
          all += value - most;
          value = expf(value - most);
          total += value;
        }
      }
    total = quad_sum(total);
    first = min(first, __shfl_xor_sync(~0u, first, 1));
    first = min(first, __shfl_xor_sync(~0u, first, 2));
    right = first == label;
    const float size = logf(total), inverse = weight / total;
    loss = size - (1.f - smoothing) * quad_sum(chosen) - (SMOOTHS ? smoothing / OUTPUTS * quad_sum(all) : 0.f);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        float& value = z[n][half * 2 + e];
        value = unit < OUTPUTS ? value * inverse - weight * ((unit == label ? 1.f - smoothing : 0.f) + (SMOOTHS ? smoothing / OUTPUTS : 0.f)) : 0.f;
      }
  } else {
    right = 0;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 unit = n * 8 + q * 2 + e;
        float& value = z[n][half * 2 + e];
        const bool real = unit < OUTPUTS;
        const float wanted = real ? __uint_as_float(target[unit]) : 0.f;
        if constexpr (LOSS == MSE) {
          const float off = real ? value - wanted : 0.f;
          loss = fmaf(off, off, loss);
          value = 2.f * weight * off;
        } else {
          if (real) {
            loss += fmaxf(value, 0.f) - value * wanted + log1pf(expf(-fabsf(value)));
            right += (value > 0.f) == (wanted > 0.5f);
          }
          value = real ? weight * (sigmoid_of(value) - wanted) : 0.f;
        }
      }
    loss = quad_sum(loss);
    right += __shfl_xor_sync(~0u, right, 1);
    right += __shfl_xor_sync(~0u, right, 2);
  }
  return loss;
}

// Outputs and loss of a pass. Row tiles' sums of the loss lie at AT_LOSSES afterwards, right predictions are added at AT_CORRECT.
template <class L, class Read> INLINE void outputs(Context& c, const Weights<L>& w, const Draw& draw, const Tally& tally, Read read) {
  for (int group = 0; group < ROW_TILES / GROUP_TILES; ++group) {
    float sum[GROUP_TILES][L::NT][4];
    multiply<L>(c, w, group, sum, read);
    const u32 part = c.shared + AT_PARTIALS + c.turn * PARTIALS_BYTES;
    c.turn ^= 1;
    if (c.warp < L::SPLIT)
#pragma unroll
      for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
        for (int n = 0; n < L::NT; ++n) store_shared(part + (((c.warp * GROUP_TILES + m) * L::NT + n) * 32 + c.lane) * 16, sum[m][n]);
    __syncthreads();
    if (c.warp < GROUP_TILES) {
      const int m = c.warp, row_tile = group * GROUP_TILES + m;
      float z[L::NT][4], slope[L::NT][4];
#pragma unroll
      for (int n = 0; n < L::NT; ++n) {
        float extra[4];
        load_shared(part + ((m * L::NT + n) * 32 + c.lane) * 16, z[n]);
#pragma unroll
        for (int from = 1; from < L::SPLIT; ++from) {
          load_shared(part + (((from * GROUP_TILES + m) * L::NT + n) * 32 + c.lane) * 16, extra);
#pragma unroll
          for (int e = 0; e < 4; ++e) z[n][e] += extra[e];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          slope[n][e] = 1.f;
          z[n][e] = fmaf(z[n][e], L::INPUT_SCALE, load_float(c.shared + L::AT_BIAS + (n * 8 + c.q * 2 + (e & 1)) * 4));
        }
        L::chain(z[n], slope[n], draw, draw.row + row_tile * 16 + c.g, n * 8);
      }
      float loss = 0.f;
      u32 right = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row = row_tile * 16 + c.g + half * 8;
        const bool real = row < tally.rows;
        const u64 number = real ? (tally.row_table ? load_word(tally.row_table + row * 4) : tally.first_row + row) : tally.first_row;
        u32 hit;
        const float one = row_loss<L::NT>(z, half, c.q, tally.targets + number * TARGET_WORDS, tally.smoothing, real ? tally.row_weight : 0.f, hit);
        loss += real ? one : 0.f;
        right += real ? hit : 0;
        if (!real)  // 0 times an overflow is not 0
#pragma unroll
          for (int n = 0; n < L::NT; ++n) z[n][half * 2] = z[n][half * 2 + 1] = 0.f;
      }
      loss = column_sum(loss);
      right = __reduce_add_sync(~0u, c.q == 0 ? right : 0);
      if (c.lane == 0) {
        store_float(c.shared + AT_LOSSES + row_tile * 4, loss);
        atomicAdd((u32*)__cvta_shared_to_generic(c.shared + AT_CORRECT), right);
      }
      if (draw.training)
#pragma unroll
        for (int n = 0; n < L::NT; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) z[n][e] *= slope[n][e];
          u32 upper[PLANES], lower[PLANES];
          split(z[n][0], z[n][1], upper);
          split(z[n][2], z[n][3], lower);
#pragma unroll
          for (int plane = 0; plane < PLANES; ++plane) {
            const u32 index = (plane * ROW_TILES + row_tile) * L::OUT_KT + n / 2;
            store_shared(c.shared + AT_OUTPUT_GRADIENT + (index * 32 + c.lane) * 16 + (n & 1) * 8, upper[plane], lower[plane]);
            const u32 at = c.shared + L::AT_DELTA + (((plane * ROW_TILES + row_tile) * L::NT + n) * 32 + c.lane) * 8;
            store_shared(at, transposed(upper[plane]), transposed(lower[plane]));
          }
          const float sum0 = column_sum(z[n][0] + z[n][2]), sum1 = column_sum(z[n][1] + z[n][3]);
          if (c.g == 0) {
            const u32 at = c.shared + L::AT_BIAS_SUMS + (row_tile * L::UNITS + n * 8 + c.q * 2) * 4;
            store_float(at, sum0);
            store_float(at + 4, sum1);
          }
        }
    }
  }
  c.dead = __syncthreads_or(c.dead);
}
