// The placement for small networks with many rows: every block has the whole network and a part of the rows.
//
// A team of TEAM warps takes a tile of 16 rows through all layers and back. Each of its warps has N_TILES_PER_WARP tiles of a layer's
// units, the same ones in both directions. Values and deltas are stored in shared memory in the layout of `ldmatrix`: for the
// team's next layer, and for the weights' gradient, whose tiles the warps of the block divide. Outputs and loss are so few that
// every warp of a team computes all of them, and so has their gradient in registers. One 16-bit copy of the weights serves both
// directions, read as it is or transposed.
#pragma once
#include "train.cuh"

INLINE int member(const Context& c) { return c.warp % TEAM; }
INLINE void sync_team(const Context& c) {
  if constexpr (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(1 + c.warp / TEAM), "n"(TEAM * 32) : "memory");
}
// The warp's tiles of a layer: N_TILES_PER_WARP from this one on, as far as they exist.
template <class L> INLINE int first_tile(const Context& c) { return member(c) * L::N_TILES_PER_WARP; }
template <class L> INLINE bool has_tile(int n) { return L::N_TILES_PER_WARP * TEAM == L::N_TILES || n < L::N_TILES; }

// Address in layer L's copy: [plane][tile of outputs][tile of inputs], eight outputs of 16 bytes (eight inputs) each.
template <class L> INLINE u32 copy_at(const Context& c, int plane, int n, int input_tile) {
  return c.shared + L::AT_COPIES + ((plane * L::N_TILES + n) * (L::K_TILES * 2) + input_tile) * 128;
}
// Address of values or deltas of the block's rows: [plane][row tile][tile of units], 16 rows of 16 bytes.
template <class L> INLINE u32 unit_tile_at(const Context& c, int at, int plane, int m, int n) { return c.shared + at + ((plane * ROW_TILES + m) * L::N_TILES + n) * 256; }
template <class L> INLINE void read_values(const Context& c, int m, int k_tile, int plane, u32 (&left)[4]) { load_matrices(unit_tile_at<L>(c, L::AT_VALUES, plane, m, k_tile * 2) + c.lane * 16, left); }
template <class L> INLINE void read_deltas(const Context& c, int m, int k_tile, int plane, u32 (&left)[4]) { load_matrices(unit_tile_at<L>(c, L::AT_DELTA, plane, m, k_tile * 2) + c.lane * 16, left); }
template <class L> INLINE void store_unit_tile(const Context& c, int at, int m, int n, const u32 (&upper)[PLANES], const u32 (&lower)[PLANES]) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    store_word(unit_tile_at<L>(c, at, plane, m, n) + c.lane * 4, upper[plane]);
    store_word(unit_tile_at<L>(c, at, plane, m, n) + c.lane * 4 + 128, lower[plane]);
  }
}

// The right operands of TILES tiles over K_TILES k tiles. Few of them are all read ahead and kept: before a barrier, so that they are
// ready at once after it.
template <class Source, int TILES, int K_TILES> struct Rights {
  static constexpr bool KEPT = TILES * K_TILES * PLANES <= 16 && FREE_REGISTERS >= 100;
  u32 kept[KEPT ? PLANES : 1][KEPT ? TILES : 1][KEPT ? K_TILES : 1][2];
  INLINE void prepare(const Context& c) {
    if constexpr (KEPT)
#pragma unroll
      for (int k_tile = 0; k_tile < K_TILES; ++k_tile)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int plane = 0; plane < PLANES; ++plane) Source::read(c, plane, n, k_tile, kept[plane][n][k_tile]);
  }
  INLINE void get(const Context& c, int plane, int n, int k_tile, u32 (&w)[2]) const {
    if constexpr (KEPT) w[0] = kept[plane][n][k_tile][0], w[1] = kept[plane][n][k_tile][1];
    else Source::read(c, plane, n, k_tile, w);
  }
};
// Forward, k are the inputs of a k tile; backward, the outputs of tiles 2 * k_tile and 2 * k_tile + 1. OWN: of the warp's units, else of all.
template <class L, bool OWN> struct Forward {
  INLINE static void read(const Context& c, int plane, int n, int k_tile, u32 (&w)[2]) {
    const int tile = (OWN ? first_tile<L>(c) : 0) + n;
    if (!OWN || has_tile<L>(tile)) load_matrices(copy_at<L>(c, plane, tile, k_tile * 2) + (c.lane & 15) * 16, w);
  }
};
template <class L, class Previous> struct Backward {
  INLINE static void read(const Context& c, int plane, int n, int k_tile, u32 (&w)[2]) {
    const int tile = first_tile<Previous>(c) + n;
    if (has_tile<Previous>(tile)) load_transposed(copy_at<L>(c, plane, k_tile * 2 + ((c.lane >> 3) & 1), tile) + (c.lane & 7) * 16, w);
  }
};
template <class L> using ForwardWeights = Rights<Forward<L, true>, L::N_TILES_PER_WARP, L::K_TILES>;
template <class L> using OutwardWeights = Rights<Forward<L, false>, L::N_TILES, L::K_TILES>;
template <class L, class Previous> using BackwardWeights = Rights<Backward<L, Previous>, Previous::N_TILES_PER_WARP, L::N_TILES / 2>;

// The sums of tiles `from` to `from + TILES` of the weights over K_TILES k tiles: `read(k_tile, plane, left)`. Few tiles have two
// chains of products each, for even and odd k tiles, because a product takes 33 clocks.
template <int K_TILES, int TILES, int LEFT_PLANES, class Weights, class Read> INLINE void tile_sums(const Context& c, int from, float (&sum)[TILES][4], const Weights& weights, Read read) {
  constexpr int CHAINS = TILES <= 2 && K_TILES >= 4 && PLANES == 1 ? 2 : 1;
  float part[CHAINS][TILES][4];
#pragma unroll
  for (int i = 0; i < CHAINS * TILES; ++i) clear(part[i / TILES][i % TILES]);
#pragma unroll(K_TILES <= 8 ? K_TILES : 2)
  for (int k_tile = 0; k_tile < K_TILES; ++k_tile) {
    u32 left[LEFT_PLANES][4];
#pragma unroll
    for (int plane = 0; plane < LEFT_PLANES; ++plane) read(k_tile, plane, left[plane]);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 words[2];
        weights.get(c, right, from + n, k_tile, words);
#pragma unroll
        for (int plane = 0; plane < LEFT_PLANES; ++plane)
          if (plane + right < PLANES) multiply_add(part[k_tile % CHAINS][n], left[plane], words[0], words[1]);
      }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] = CHAINS == 2 ? part[0][n][e] + part[CHAINS - 1][n][e] : part[0][n][e];
}
// Bias and chain of a tile. `slope` becomes the derivative of the values by the sums, 0 beyond the layer's units.
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

// The slopes of the warp's tiles, for the backward pass. Those of ReLU, alone or before dropout, follow from the stored values.
template <class L> struct KeptSlopes : Tiles<L::N_TILES_PER_WARP, L::SLOPES_SHARED> {
  INLINE void get(const Context&, const Draw&, int, int i, float (&slope)[4]) const { Tiles<L::N_TILES_PER_WARP, L::SLOPES_SHARED>::get(i, slope); }
};
template <class L> struct SlopesOfValues {
  INLINE void place(const Context&, u32) {}
  INLINE void set(int, const float (&)[4]) {}
  INLINE void get(const Context& c, const Draw& draw, int m, int i, float (&slope)[4]) const {
    const u32 at = unit_tile_at<L>(c, L::AT_VALUES, 0, m, first_tile<L>(c) + i) + c.lane * 4, upper = load_word(at), lower = load_word(at + 128);
    const float kept = L::slope_of_kept(draw);
    slope[0] = low_of(upper) > 0.f ? kept : 0.f, slope[1] = high_of(upper) > 0.f ? kept : 0.f;
    slope[2] = low_of(lower) > 0.f ? kept : 0.f, slope[3] = high_of(lower) > 0.f ? kept : 0.f;
  }
};
template <class L, bool OF_VALUES> struct ChosenSlopes { using Type = KeptSlopes<L>; };
template <class L> struct ChosenSlopes<L, true> { using Type = SlopesOfValues<L>; };
template <class L> using Slopes = typename ChosenSlopes<L, L::SLOPES_OF_VALUES>::Type;

// Takes a row tile through the warp's tiles of a hidden layer.
template <class L, class Read> INLINE void tile_forward(const Context& c, const Draw& draw, int m, const ForwardWeights<L>& weights, Slopes<L>& slopes, Read read) {
  constexpr int TILES = L::N_TILES_AT_ONCE;
#pragma unroll
  for (int from = 0; from < L::N_TILES_PER_WARP; from += TILES) {
    const int first = first_tile<L>(c) + from;
    float sum[TILES][4];
    tile_sums<L::K_TILES, TILES, L::IN_PLANES>(c, from, sum, weights, read);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (has_tile<L>(first + i)) {
        float slope[4];
        u32 upper[PLANES], lower[PLANES];
        finish_tile<L>(c, draw, draw.row + m * 16 + c.g, first + i, sum[i], slope);
        slopes.set(from + i, slope);
        split(sum[i][0], sum[i][1], upper);
        split(sum[i][2], sum[i][3], lower);
        store_unit_tile<L>(c, L::AT_VALUES, m, first + i, upper, lower);
      }
  }
}
// Stores the deltas of a tile, and their sums for the bias.
template <class L> INLINE void store_deltas(const Context& c, int m, int n, const float (&d)[4], const u32 (&upper)[PLANES], const u32 (&lower)[PLANES]) {
  store_unit_tile<L>(c, L::AT_DELTA, m, n, upper, lower);
  if constexpr (!L::BIAS) return;
  const float sum0 = column_sum(d[0] + d[2]), sum1 = column_sum(d[1] + d[3]);
  if (c.g == 0) store_shared(c.shared + AT_BIAS_SUMS + (m * ALL_UNITS + L::UNIT_AT + n * 8 + c.q * 2) * 4, sum0, sum1);
}
struct Score {
  float loss;
  u32 correct;
  INLINE Score of_warp() const { return {column_sum(quad_sum(loss)), __reduce_add_sync(~0u, correct)}; }
};
// Outputs, loss and gradient of a row tile. `out` is the gradient as a left operand. The team's first warp stores the gradient and
// counts the score.
template <class L, class Read> INLINE void tile_outputs(const Context& c, const Draw& draw, const Tally& tally, int m, const OutwardWeights<L>& weights, Score& score, u32 (&out)[PLANES][L::N_TILES / 2][4], Read read) {
  float sum[L::N_TILES][4], slope[L::N_TILES][4];
  tile_sums<L::K_TILES, L::N_TILES, L::IN_PLANES>(c, 0, sum, weights, read);
#pragma unroll
  for (int n = 0; n < L::N_TILES; ++n) finish_tile<L>(c, draw, draw.row + m * 16 + c.g, n, sum[n], slope[n]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 row = m * 16 + half * 8 + c.g;
    const bool real = row < tally.rows, counts = real && member(c) == 0;
    float z[L::N_TILES][2];
#pragma unroll
    for (int n = 0; n < L::N_TILES; ++n) z[n][0] = sum[n][half * 2], z[n][1] = sum[n][half * 2 + 1];
    Result result = row_loss(Quad<L::N_TILES>{z, c.q}, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real ? weighted(tally.row_weight, tally, row) : 0.f);
    settle(Quad<L::N_TILES>{z, c.q}, result);
    score.loss += counts ? weighted(result.loss, tally, row) : 0.f;
    score.correct += counts ? result.correct : 0;
#pragma unroll
    for (int n = 0; n < L::N_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[n][half * 2 + e] = real ? z[n][e] * slope[n][half * 2 + e] : 0.f;  // not a multiplication by 0: an overflow times 0 is NaN
  }
#pragma unroll
  for (int n = 0; n < L::N_TILES; ++n) {
    u32 upper[PLANES], lower[PLANES];
    split(sum[n][0], sum[n][1], upper);
    split(sum[n][2], sum[n][3], lower);
    if (draw.training && member(c) == 0) store_deltas<L>(c, m, n, sum[n], upper, lower);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) out[plane][n / 2][(n & 1) * 2] = upper[plane], out[plane][n / 2][(n & 1) * 2 + 1] = lower[plane];
  }
}
// From a layer's deltas to the warp's tiles of the deltas of the layer before. `read` gives the deltas as left operands.
template <class L, class Previous, class Read> INLINE void tile_backward(const Context& c, const Draw& draw, int m, const BackwardWeights<L, Previous>& weights, const Slopes<Previous>& slopes, Read read) {
  constexpr int TILES = Previous::N_TILES_AT_ONCE;
#pragma unroll
  for (int from = 0; from < Previous::N_TILES_PER_WARP; from += TILES) {
    const int first = first_tile<Previous>(c) + from;
    float d[TILES][4];
    tile_sums<L::N_TILES / 2, TILES, PLANES>(c, from, d, weights, read);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (has_tile<Previous>(first + i)) {
        float slope[4];
        u32 upper[PLANES], lower[PLANES];
        slopes.get(c, draw, m, from + i, slope);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][e] *= slope[e];
        split(d[i][0], d[i][1], upper);
        split(d[i][2], d[i][3], lower);
        store_deltas<Previous>(c, m, first + i, d[i], upper, lower);
      }
  }
}
