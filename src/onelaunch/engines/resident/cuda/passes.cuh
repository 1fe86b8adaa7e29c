// The phases of a pass: products with their epilogues, forward and backward.
//
// Every product is split over the warps along k. The partial sums meet in shared memory and are added in the order of the warps,
// so the result has the same bits every time.
#pragma once
#include "random.cuh"
#include "weights.cuh"

// Address of partial sums: [warp][row tile][tile of units][half][lane], two floats each. Without a buffer of their own, a tile of units
// overwrites one of the warp's staged k tiles (plane 0), which its products have read already.
INLINE u32 partial_at(const Context& c, u32 buffer, int warp, int tile, int tiles, int half) {
  const int place = PARTIAL_BUFFERS ? warp * ROW_TILES_AT_ONCE * tiles + tile : (tile % tiles * WARPS + warp) * (PLANES * ROW_TILES) + tile / tiles;
  return buffer + ((place * 2 + half) * 32 + c.lane) * 8;
}
template <int N_TILES, int SPLIT_K> INLINE u32 store_partials(Context& c, const float (&sum)[ROW_TILES_AT_ONCE][N_TILES][4]) {
  if (PARTIAL_BUFFERS == 1) __syncthreads();  // all warps have read the sums before these
  if (PARTIAL_BUFFERS == 0) __syncwarp();  // the warp has read what it staged; a barrier since then ended the reads of earlier sums
  const u32 buffer = c.shared + AT_PARTIALS + c.turn * PARTIALS_BYTES;
  c.turn ^= PARTIAL_BUFFERS == 2;
  if (c.warp < SPLIT_K)
#pragma unroll
    for (int m = 0; m < ROW_TILES_AT_ONCE; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n) {
        store_shared(partial_at(c, buffer, c.warp, m * N_TILES + n, N_TILES, 0), sum[m][n][0], sum[m][n][1]);
        store_shared(partial_at(c, buffer, c.warp, m * N_TILES + n, N_TILES, 1), sum[m][n][2], sum[m][n][3]);
      }
  __syncthreads();
  return buffer;
}
template <int SPLIT_K> INLINE void add_partials(const Context& c, u32 buffer, int tile, int tiles, int half, float& a, float& b) {
  float part[SPLIT_K][2];
#pragma unroll
  for (int w = 0; w < SPLIT_K; ++w) load_shared(partial_at(c, buffer, w, tile, tiles, half), part[w]);
  a = part[0][0], b = part[0][1];
#pragma unroll
  for (int w = 1; w < SPLIT_K; ++w) a += part[w][0], b += part[w][1];
}

// Adds up the partial sums and calls `finish(row tile in the group, tile of units, first half, values)`: a lane gets
// ROW_BLOCKS_PER_WARP rows of a tile, eight apart, and two neighbouring units of each.
template <int N_TILES, int SPLIT_K, class Finish> INLINE void reduce(Context& c, const float (&sum)[ROW_TILES_AT_ONCE][N_TILES][4], Finish finish) {
  const u32 buffer = store_partials<N_TILES, SPLIT_K>(c, sum);
  constexpr int PARTS = ROW_TILES_AT_ONCE * N_TILES * 2 / ROW_BLOCKS_PER_WARP;
#pragma unroll
  for (int first = 0; first < PARTS; first += WARPS) {
    const int part = first + c.warp;
    if (PARTS % WARPS && part >= PARTS) break;
    const int tile = part * ROW_BLOCKS_PER_WARP / 2, half = ROW_BLOCKS_PER_WARP == 1 ? part & 1 : 0;
    float total[2 * ROW_BLOCKS_PER_WARP];
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS_PER_WARP; ++i) add_partials<SPLIT_K>(c, buffer, tile, N_TILES, half + i, total[2 * i], total[2 * i + 1]);
    finish(tile / N_TILES, tile % N_TILES, half, total);
  }
}

// The masters as right operands, rounded and transposed. Few of them are prepared before the wait for other blocks' values.
template <class L> struct Operands {
  static constexpr bool KEPT = IS_CLUSTER && !L::FIRST && L::K_TILES_PER_WARP * L::N_TILES * PLANES <= 4;
  u32 kept[KEPT ? L::K_TILES_PER_WARP * L::N_TILES : 1][PLANES][2];
  INLINE static void make(const Weights<L>& w, int tile, u32 (&right)[PLANES][2]) {
    float t[4];
    w.master.get(tile, t);
    u32 low[PLANES], high[PLANES];
    split(t[0], t[1], low);
    split(t[2], t[3], high);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) right[plane][0] = transposed(low[plane]), right[plane][1] = transposed(high[plane]);
  }
  INLINE void prepare(const Weights<L>& w) {
    if constexpr (KEPT)
#pragma unroll
      for (int tile = 0; tile < L::K_TILES_PER_WARP * L::N_TILES; ++tile) make(w, tile, kept[tile]);
  }
  INLINE void get(const Weights<L>& w, int tile, u32 (&right)[PLANES][2]) const {
    if constexpr (!KEPT) make(w, tile, right);
    else
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) right[plane][0] = kept[tile][plane][0], right[plane][1] = kept[tile][plane][1];
  }
};

// The sums of a layer for a group of row tiles: its inputs times the masters. `read(row tile, k, plane, left)`.
template <class L, class Read> INLINE void multiply(const Context& c, const Weights<L>& w, const Operands<L>& operands, int group, float (&sum)[ROW_TILES_AT_ONCE][L::N_TILES][4], Read read) {
  constexpr int CHAINS = IS_CLUSTER && PLANES == 1 && L::K_TILES_PER_WARP >= 4 && ROW_TILES_AT_ONCE * L::N_TILES <= 2 ? 2 : 1;  // of dependent products, 33 clocks each
  float part[CHAINS][ROW_TILES_AT_ONCE][L::N_TILES][4];
#pragma unroll
  for (int i = 0; i < CHAINS * ROW_TILES_AT_ONCE * L::N_TILES; ++i) clear(part[i / L::N_TILES / ROW_TILES_AT_ONCE][i / L::N_TILES % ROW_TILES_AT_ONCE][i % L::N_TILES]);
#pragma unroll
  for (int k = 0; k < L::K_TILES_PER_WARP; ++k)
    if (Weights<L>::mine(c, k)) {
      u32 left[L::IN_PLANES][ROW_TILES_AT_ONCE][4];
#pragma unroll
      for (int plane = 0; plane < L::IN_PLANES; ++plane)
#pragma unroll
        for (int m = 0; m < ROW_TILES_AT_ONCE; ++m) read(group * ROW_TILES_AT_ONCE + m, k, plane, left[plane][m]);
#pragma unroll
      for (int n = 0; n < L::N_TILES; ++n) {
        u32 words[PLANES][2];
        operands.get(w, k * L::N_TILES + n, words);
#pragma unroll
        for (int right = 0; right < PLANES; ++right)
#pragma unroll
          for (int plane = 0; plane < L::IN_PLANES; ++plane)
            if (plane + right < PLANES)
#pragma unroll
              for (int m = 0; m < ROW_TILES_AT_ONCE; ++m) multiply_add(part[k % CHAINS][m][n], left[plane][m], words[right][0], words[right][1]);
      }
    }
#pragma unroll
  for (int i = 0; i < ROW_TILES_AT_ONCE * L::N_TILES * 4; ++i) {
    const int m = i / 4 / L::N_TILES, n = i / 4 % L::N_TILES, e = i % 4;
    sum[m][n][e] = CHAINS == 2 ? part[0][m][n][e] + part[CHAINS - 1][m][n][e] : part[0][m][n][e];
  }
}

template <class L> INLINE u32 slope_at(const Context& c, int row_tile, int n, int half) {
  return c.shared + L::AT_SLOPE + (((row_tile * L::N_TILES + n) * 2 + half) * 32 + c.lane) * 8;
}
template <int EXCHANGE, int AT, u32 STRIDE, class L, int N> INLINE void publish(const Context& c, u32 count, int row_tile, int n, int half, const u32 (&words)[N][PLANES]) {
  const u32 place = c.rank * L::N_TILES + n;
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    u32 w[N];
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = words[i][plane];
    publish_left<EXCHANGE, AT, STRIDE>(c, count, (plane * ROW_TILES + row_tile) * L::NEXT_K_TILES + place / 2, place & 1, half, w);
  }
}
// Stores the block's own values or deltas: [plane][row tile][tile of units], 16 rows of 16 bytes.
template <int AT, int N_TILES, int N> INLINE void keep_words(const Context& c, int row_tile, int n, int half, const u32 (&words)[N][PLANES]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
      store_word(c.shared + AT + ((plane * ROW_TILES + row_tile) * N_TILES + n) * 256 + (half + i) * 128 + c.lane * 4, words[i][plane]);
}
// Stores the deltas of N / 2 rows of a tile for the weights' gradient, and their sums by unit for the bias's gradient.
template <class L, int N> INLINE void keep_delta(const Context& c, int row_tile, int n, int half, const float (&d)[N], const u32 (&words)[N / 2][PLANES]) {
  float sum[2] = {0.f, 0.f};
  keep_words<L::AT_DELTA, L::N_TILES>(c, row_tile, n, half, words);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0] += d[2 * i], sum[1] += d[2 * i + 1];
  sum[0] = column_sum(sum[0]), sum[1] = column_sum(sum[1]);
  if (c.g == 0) store_shared(c.shared + L::AT_BIAS_SUMS + ((row_tile * 2 + half) * L::UNITS + n * 8 + c.q * 2) * 4, sum[0], sum[1]);
}

// Receivers of a hidden layer's values: all blocks, or none (the block keeps them).
template <class L> struct ToAll {
  const Context& c;
  template <int N> INLINE void operator()(int row_tile, int n, int half, const u32 (&words)[N][PLANES]) const { publish<L::OUT_EXCHANGE, L::AT_OUT, L::OUT_STRIDE, L>(c, c.passes, row_tile, n, half, words); }
};
struct ToNobody {
  template <int N> INLINE void operator()(int, int, int, const u32 (&)[N][PLANES]) const {}
};
// A hidden layer: products, bias, activations and dropout. `give` sends the values to the blocks that need them.
template <class L, class Read, class Give> INLINE void forward(Context& c, const Weights<L>& w, const Operands<L>& operands, const Draw& draw, Read read, const Give& give) {
  for (int group = 0; group < ROW_TILES / ROW_TILES_AT_ONCE; ++group) {
    float sum[ROW_TILES_AT_ONCE][L::N_TILES][4];
    multiply<L>(c, w, operands, group, sum, read);
    reduce<L::N_TILES, L::SPLIT_K>(c, sum, [&](int m, int n, int half, float (&z)[2 * ROW_BLOCKS_PER_WARP]) {
      const int row_tile = group * ROW_TILES_AT_ONCE + m;
      const u32 unit = n * 8 + c.q * 2, first = c.rank * L::UNITS;
      float bias[2], slope[2 * ROW_BLOCKS_PER_WARP];
      load_shared(c.shared + L::AT_BIAS + unit * 4, bias);
#pragma unroll
      for (int e = 0; e < 2 * ROW_BLOCKS_PER_WARP; ++e) {
        z[e] = fmaf(z[e], L::INPUT_SCALE, bias[e & 1]);
        slope[e] = 1.f;
      }
      L::chain(z, slope, draw, draw.row + row_tile * 16 + half * 8 + c.g, first + n * 8);
      u32 words[ROW_BLOCKS_PER_WARP][PLANES];
#pragma unroll
      for (int i = 0; i < ROW_BLOCKS_PER_WARP; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (first + unit + e >= L::OUT) z[2 * i + e] = slope[2 * i + e] = 0.f;
        if (draw.training) store_shared(slope_at<L>(c, row_tile, n, half + i), slope[2 * i], slope[2 * i + 1]);
        split(z[2 * i], z[2 * i + 1], words[i]);
      }
      give(row_tile, n, half, words);
      if constexpr (L::KEEPS_VALUES) keep_words<L::AT_OWN, L::N_TILES>(c, row_tile, n, half, words);
    });
  }
  raise_flag<L::OUT_EXCHANGE>(c, c.passes);
}

// Finished deltas of a hidden layer: kept for its weights, and sent to all blocks if an earlier layer needs them.
template <class L, int N> INLINE void deliver(const Context& c, int row_tile, int n, int half, float (&d)[N]) {
  u32 words[N / 2][PLANES];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    float slope[2];
    load_shared(slope_at<L>(c, row_tile, n, half + i), slope);
    d[2 * i] *= slope[0], d[2 * i + 1] *= slope[1];
    split(d[2 * i], d[2 * i + 1], words[i]);
  }
  if constexpr (!L::FIRST) publish<L::DELTA_EXCHANGE, L::AT_ALL_DELTAS, 0, L>(c, c.backs, row_tile, n, half, words);
  keep_delta<L>(c, row_tile, n, half, d, words);
}

// From the gradient of the outputs, which is in this block's memory, to the deltas of the last hidden layer.
template <class Last, class L> INLINE void back_from_outputs(Context& c) {
  constexpr int PARTS = IS_CLUSTER && ROW_TILES * L::N_TILES * 2 <= WARPS ? 2 : 1;  // per tile: sending takes the longest
#pragma unroll 2
  for (int first = 0; first < ROW_TILES * L::N_TILES * PARTS; first += WARPS) {
    const int part = first + c.warp, tile = part / PARTS, row_tile = tile / L::N_TILES, n = tile % L::N_TILES;
    if (tile >= ROW_TILES * L::N_TILES) break;
    float sum[4];
    clear(sum);
#pragma unroll
    for (int k_tile = 0; k_tile < Last::NEXT_K_TILES; ++k_tile) {
      u32 left[PLANES][4], right[2];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
        load_matrices(c.shared + Last::AT_DELTA + ((plane * ROW_TILES + row_tile) * Last::NEXT_K_TILES + k_tile) * 512 + c.lane * 16, left[plane]);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        load_matrices(c.shared + Last::AT_BACK + ((plane * L::N_TILES + n) * Last::NEXT_K_TILES + k_tile) * 256 + (c.lane & 15) * 16, right);
#pragma unroll
        for (int other = 0; other + plane < PLANES; ++other) multiply_add(sum, left[other], right[0], right[1]);
      }
    }
    if constexpr (PARTS == 1) {
      deliver<L>(c, row_tile, n, 0, sum);
    } else {
      const int half = part & 1;
      float rows[2] = {half ? sum[2] : sum[0], half ? sum[3] : sum[1]};
      deliver<L>(c, row_tile, n, half, rows);
    }
  }
  if constexpr (!L::FIRST) raise_flag<L::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (L::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
}

// Awaits the copies of a layer's weights for the backward pass, new in every step. In a grid the flags of the deltas cover them.
template <class L> INLINE void wait_for_weights(Context& c, bool first_micro_batch) {
  if (first_micro_batch && IS_CLUSTER) wait_for<L::BACK_EXCHANGE>(c, c.step, 0, 1);
}

// From all blocks' deltas of a hidden layer to this block's deltas of the layer before it.
template <class L, class Previous> INLINE void back(Context& c) {
  constexpr int K_TILES_PER_WARP = (L::NEXT_K_TILES + WARPS - 1) / WARPS;
  stage<L::AT_ALL_DELTAS, 0, L::NEXT_K_TILES>(c, c.backs);
  wait_for_staging();
  for (int group = 0; group < ROW_TILES / ROW_TILES_AT_ONCE; ++group) {
    float sum[ROW_TILES_AT_ONCE][Previous::N_TILES][4];
#pragma unroll
    for (int m = 0; m < ROW_TILES_AT_ONCE; ++m)
#pragma unroll
      for (int n = 0; n < Previous::N_TILES; ++n) clear(sum[m][n]);
#pragma unroll
    for (int k = 0; k < K_TILES_PER_WARP; ++k) {
      const int k_tile = k * WARPS + c.warp;
      if ((k + 1) * WARPS <= L::NEXT_K_TILES || k_tile < L::NEXT_K_TILES) {
        u32 left[PLANES][ROW_TILES_AT_ONCE][4];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
          for (int m = 0; m < ROW_TILES_AT_ONCE; ++m)
            read_left<L::AT_ALL_DELTAS, 0, L::NEXT_K_TILES>(c, c.backs, plane * ROW_TILES + group * ROW_TILES_AT_ONCE + m, k, left[plane][m]);
#pragma unroll
        for (int n = 0; n < Previous::N_TILES; ++n)
#pragma unroll
          for (int right = 0; right < PLANES; ++right) {
            u32 words[2];
            read_right<L::AT_BACK, L::BACK_BYTES, true>(c, c.step, ((right * Previous::N_TILES + n) * L::NEXT_K_TILES + k_tile) * 2, words);
#pragma unroll
            for (int plane = 0; plane + right < PLANES; ++plane)
#pragma unroll
              for (int m = 0; m < ROW_TILES_AT_ONCE; ++m) multiply_add(sum[m][n], left[plane][m], words[0], words[1]);
          }
      }
    }
    if (PARTIAL_BUFFERS && group + 1 == ROW_TILES / ROW_TILES_AT_ONCE) stage<Previous::AT_OUT, Previous::OUT_STRIDE, Previous::NEXT_K_TILES>(c, c.passes);  // for the update
    constexpr int SPLIT_K = L::NEXT_K_TILES < WARPS ? L::NEXT_K_TILES : WARPS;
    reduce<Previous::N_TILES, SPLIT_K>(c, sum, [&](int m, int n, int half, float (&d)[2 * ROW_BLOCKS_PER_WARP]) { deliver<Previous>(c, group * ROW_TILES_AT_ONCE + m, n, half, d); });
  }
  if constexpr (!Previous::FIRST) raise_flag<Previous::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (Previous::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
  if (!PARTIAL_BUFFERS) stage<Previous::AT_OUT, Previous::OUT_STRIDE, Previous::NEXT_K_TILES>(c, c.passes);
}
