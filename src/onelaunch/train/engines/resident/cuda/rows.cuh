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
