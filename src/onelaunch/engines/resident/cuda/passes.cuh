// The phases of a pass: products with their epilogues, forward and back.
//
// Every product is split over the warps along its inner dimension; partial sums meet in shared memory and are added in the
// order of the warps, so the same bits come out every time.
#pragma once
#include "random.cuh"
#include "weights.cuh"

// Partial sums of a group of row tiles: [warp][row tile][tile of units][half][lane], two floats each. Where they have no buffer, a
// tile of units takes the place of one of the warp's staged steps, of plane 0, which its products have read by then.
INLINE u32 partial_at(const Context& c, u32 buffer, int warp, int tile, int tiles, int half) {
  const int place = PARTIAL_BUFFERS ? warp * GROUP_TILES * tiles + tile : (tile % tiles * WARPS + warp) * (PLANES * ROW_TILES) + tile / tiles;
  return buffer + ((place * 2 + half) * 32 + c.lane) * 8;
}
template <int NT, int SPLIT> INLINE u32 store_partials(Context& c, const float (&sum)[GROUP_TILES][NT][4]) {
  if (PARTIAL_BUFFERS == 1) __syncthreads();  // the sums before these are read
  if (PARTIAL_BUFFERS == 0) __syncwarp();     // what the warp has staged is read; the sums before these too, since a barrier
  const u32 buffer = c.shared + AT_PARTIALS + c.turn * PARTIALS_BYTES;
  c.turn ^= PARTIAL_BUFFERS == 2;
  if (c.warp < SPLIT)
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        store_shared(partial_at(c, buffer, c.warp, m * NT + n, NT, 0), sum[m][n][0], sum[m][n][1]);
        store_shared(partial_at(c, buffer, c.warp, m * NT + n, NT, 1), sum[m][n][2], sum[m][n][3]);
      }
  __syncthreads();
  return buffer;
}
template <int SPLIT> INLINE void add_partials(const Context& c, u32 buffer, int tile, int tiles, int half, float& a, float& b) {
  float part[SPLIT][2];
#pragma unroll
  for (int w = 0; w < SPLIT; ++w) load_shared(partial_at(c, buffer, w, tile, tiles, half), part[w]);
  a = part[0][0], b = part[0][1];
#pragma unroll
  for (int w = 1; w < SPLIT; ++w) a += part[w][0], b += part[w][1];
}

// Meet, and hand the finished sums to `finish(row tile in the group, tile of units, first half, values)`: a lane takes FINISH
// rows of a tile, eight apart, two neighbouring units each.
template <int NT, int SPLIT, class Finish> INLINE void reduce(Context& c, const float (&sum)[GROUP_TILES][NT][4], Finish finish) {
  const u32 buffer = store_partials<NT, SPLIT>(c, sum);
  constexpr int PARTS = GROUP_TILES * NT * 2 / FINISH;
#pragma unroll
  for (int first = 0; first < PARTS; first += WARPS) {
    const int part = first + c.warp;
    if (PARTS % WARPS && part >= PARTS) break;
    const int tile = part * FINISH / 2, half = FINISH == 1 ? part & 1 : 0;
    float total[2 * FINISH];
#pragma unroll
    for (int i = 0; i < FINISH; ++i) add_partials<SPLIT>(c, buffer, tile, NT, half + i, total[2 * i], total[2 * i + 1]);
    finish(tile / NT, tile % NT, half, total);
  }
}

// The masters as right operands: rounded and transposed. Where they are few, before others' values are awaited.
template <class L> struct Operands {
  static constexpr bool KEPT = IS_CLUSTER && !L::FIRST && L::KS * L::NT * PLANES <= 4;
  u32 kept[KEPT ? L::KS * L::NT : 1][PLANES][2];
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
      for (int tile = 0; tile < L::KS * L::NT; ++tile) make(w, tile, kept[tile]);
  }
  INLINE void get(const Weights<L>& w, int tile, u32 (&right)[PLANES][2]) const {
    if constexpr (!KEPT) make(w, tile, right);
    else
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) right[plane][0] = kept[tile][plane][0], right[plane][1] = kept[tile][plane][1];
  }
};

// The block's outputs of a layer for a group of row tiles: its inputs times the masters. `read(row tile, step, plane)`.
template <class L, class Read> INLINE void multiply(const Context& c, const Weights<L>& w, const Operands<L>& operands, int group, float (&sum)[GROUP_TILES][L::NT][4], Read read) {
  constexpr int CHAINS = IS_CLUSTER && PLANES == 1 && L::KS >= 4 && GROUP_TILES * L::NT <= 2 ? 2 : 1;  // of products, 33 clocks each
  float part[CHAINS][GROUP_TILES][L::NT][4];
#pragma unroll
  for (int i = 0; i < CHAINS * GROUP_TILES * L::NT; ++i) clear(part[i / L::NT / GROUP_TILES][i / L::NT % GROUP_TILES][i % L::NT]);
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
        u32 words[PLANES][2];
        operands.get(w, ks * L::NT + n, words);
#pragma unroll
        for (int right = 0; right < PLANES; ++right)
#pragma unroll
          for (int plane = 0; plane < L::IN_PLANES; ++plane)
            if (plane + right < PLANES)
#pragma unroll
              for (int m = 0; m < GROUP_TILES; ++m) multiply_add(part[ks % CHAINS][m][n], left[plane][m], words[right][0], words[right][1]);
      }
    }
#pragma unroll
  for (int i = 0; i < GROUP_TILES * L::NT * 4; ++i) {
    const int m = i / 4 / L::NT, n = i / 4 % L::NT, e = i % 4;
    sum[m][n][e] = CHAINS == 2 ? part[0][m][n][e] + part[CHAINS - 1][m][n][e] : part[0][m][n][e];
  }
}

template <class L> INLINE u32 slope_at(const Context& c, int row_tile, int n, int half) {
  return c.shared + L::AT_SLOPE + (((row_tile * L::NT + n) * 2 + half) * 32 + c.lane) * 8;
}
template <int EXCHANGE, int AT, u32 STRIDE, class L, int N> INLINE void publish(const Context& c, u32 count, int row_tile, int n, int half, const u32 (&words)[N][PLANES]) {
  const u32 place = c.rank * L::NT + n;
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    u32 w[N];
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = words[i][plane];
    publish_left<EXCHANGE, AT, STRIDE>(c, count, (plane * ROW_TILES + row_tile) * L::OUT_KT + place / 2, place & 1, half, w);
  }
}
// The block's own values or deltas: [plane][row tile][tile of units], 16 rows of 16 bytes.
template <int AT, int NT, int N> INLINE void keep_words(const Context& c, int row_tile, int n, int half, const u32 (&words)[N][PLANES]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
      store_word(c.shared + AT + ((plane * ROW_TILES + row_tile) * NT + n) * 256 + (half + i) * 128 + c.lane * 4, words[i][plane]);
}
// Gradients of N / 2 rows of a tile by the layer's sums, where the weights' gradient finds them, and their sums by unit.
template <class L, int N> INLINE void keep_delta(const Context& c, int row_tile, int n, int half, const float (&d)[N], const u32 (&words)[N / 2][PLANES]) {
  float sum[2] = {0.f, 0.f};
  keep_words<L::AT_DELTA, L::NT>(c, row_tile, n, half, words);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0] += d[2 * i], sum[1] += d[2 * i + 1];
  sum[0] = column_sum(sum[0]), sum[1] = column_sum(sum[1]);
  if (c.g == 0) store_shared(c.shared + L::AT_BIAS_SUMS + ((row_tile * 2 + half) * L::UNITS + n * 8 + c.q * 2) * 4, sum[0], sum[1]);
}

// Where a hidden layer's values go: to everyone, or nowhere (the block keeps them).
template <class L> struct ToAll {
  const Context& c;
  template <int N> INLINE void operator()(int row_tile, int n, int half, const u32 (&words)[N][PLANES]) const { publish<L::OUT_EXCHANGE, L::AT_OUT, L::OUT_STRIDE, L>(c, c.passes, row_tile, n, half, words); }
};
struct ToNobody {
  template <int N> INLINE void operator()(int, int, int, const u32 (&)[N][PLANES]) const {}
};
// Bias, activations and dropout of a hidden layer; its values are given to those who need them.
template <class L, class Read, class Give> INLINE void forward(Context& c, const Weights<L>& w, const Operands<L>& operands, const Draw& draw, Read read, const Give& give) {
  for (int group = 0; group < ROW_TILES / GROUP_TILES; ++group) {
    float sum[GROUP_TILES][L::NT][4];
    multiply<L>(c, w, operands, group, sum, read);
    reduce<L::NT, L::SPLIT>(c, sum, [&](int m, int n, int half, float (&z)[2 * FINISH]) {
      const int row_tile = group * GROUP_TILES + m;
      const u32 unit = n * 8 + c.q * 2, first = c.rank * L::UNITS;
      float bias[2], slope[2 * FINISH];
      load_shared(c.shared + L::AT_BIAS + unit * 4, bias);
#pragma unroll
      for (int e = 0; e < 2 * FINISH; ++e) {
        z[e] = fmaf(z[e], L::INPUT_SCALE, bias[e & 1]);
        slope[e] = 1.f;
      }
      L::chain(z, slope, draw, draw.row + row_tile * 16 + half * 8 + c.g, first + n * 8);
      u32 words[FINISH][PLANES];
#pragma unroll
      for (int i = 0; i < FINISH; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (first + unit + e >= L::OUT) z[2 * i + e] = slope[2 * i + e] = 0.f;
        if (draw.training) store_shared(slope_at<L>(c, row_tile, n, half + i), slope[2 * i], slope[2 * i + 1]);
        split(z[2 * i], z[2 * i + 1], words[i]);
      }
      give(row_tile, n, half, words);
      if constexpr (L::KEEPS_VALUES) keep_words<L::AT_OWN, L::NT>(c, row_tile, n, half, words);
    });
  }
  written<L::OUT_EXCHANGE>(c, c.passes);
}

// Finished gradients by a hidden layer's sums: kept for its weights, and given to everyone where an earlier layer needs them.
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

// From the gradient of the outputs (in this block's memory) to the deltas of the last hidden layer.
template <class Last, class L> INLINE void back_from_outputs(Context& c) {
  constexpr int PARTS = IS_CLUSTER && ROW_TILES * L::NT * 2 <= WARPS ? 2 : 1;  // of a tile: sending it takes longest
#pragma unroll 2
  for (int first = 0; first < ROW_TILES * L::NT * PARTS; first += WARPS) {
    const int part = first + c.warp, tile = part / PARTS, row_tile = tile / L::NT, n = tile % L::NT;
    if (tile >= ROW_TILES * L::NT) break;
    float sum[4];
    clear(sum);
#pragma unroll
    for (int step = 0; step < Last::OUT_KT; ++step) {
      u32 left[PLANES][4], right[2];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane)
        load_matrices(c.shared + Last::AT_DELTA + ((plane * ROW_TILES + row_tile) * Last::OUT_KT + step) * 512 + c.lane * 16, left[plane]);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        load_matrices(c.shared + Last::AT_BACK + ((plane * L::NT + n) * Last::OUT_KT + step) * 256 + (c.lane & 15) * 16, right);
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
  if constexpr (!L::FIRST) written<L::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (L::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
}

// The copies of a layer's weights for the way back, new for every step. In a grid the flags of the deltas cover them.
template <class L> INLINE void wait_for_weights(Context& c, bool first_micro_batch) {
  if (first_micro_batch && IS_CLUSTER) wait_for<L::BACK_EXCHANGE>(c, c.step, 0, 1);
}

// From a hidden layer's deltas, everyone's, to those of the layer before it.
template <class L, class Previous> INLINE void back(Context& c) {
  constexpr int STEPS = (L::OUT_KT + WARPS - 1) / WARPS;
  stage<L::AT_ALL_DELTAS, 0, L::OUT_KT>(c, c.backs);
  staged();
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
            read_left<L::AT_ALL_DELTAS, 0, L::OUT_KT>(c, c.backs, plane * ROW_TILES + group * GROUP_TILES + m, ks, left[plane][m]);
#pragma unroll
        for (int n = 0; n < Previous::NT; ++n)
#pragma unroll
          for (int right = 0; right < PLANES; ++right) {
            u32 words[2];
            read_right<L::AT_BACK, L::BACK_BYTES, true>(c, c.step, ((right * Previous::NT + n) * L::OUT_KT + step) * 2, words);
#pragma unroll
            for (int plane = 0; plane + right < PLANES; ++plane)
#pragma unroll
              for (int m = 0; m < GROUP_TILES; ++m) multiply_add(sum[m][n], left[plane][m], words[0], words[1]);
          }
      }
    }
    if (PARTIAL_BUFFERS && group + 1 == ROW_TILES / GROUP_TILES) stage<Previous::AT_OUT, Previous::OUT_STRIDE, Previous::OUT_KT>(c, c.passes);  // for the update
    constexpr int SPLIT = L::OUT_KT < WARPS ? L::OUT_KT : WARPS;
    reduce<Previous::NT, SPLIT>(c, sum, [&](int m, int n, int half, float (&d)[2 * FINISH]) { deliver<Previous>(c, group * GROUP_TILES + m, n, half, d); });
  }
  if constexpr (!Previous::FIRST) written<Previous::DELTA_EXCHANGE>(c, c.backs);
  if constexpr (Previous::FIRST || BLOCKS == 1 || IS_CLUSTER) __syncthreads();
  if (!PARTIAL_BUFFERS) stage<Previous::AT_OUT, Previous::OUT_STRIDE, Previous::OUT_KT>(c, c.passes);
}
