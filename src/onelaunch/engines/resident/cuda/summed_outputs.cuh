// The last layer in a cluster. Each block multiplies its own units by its own weights. The partial outputs of a row go to the row's
// owner, which adds them up in a fixed order, computes the loss and sends its gradient to all blocks. These two small exchanges
// replace the longest one: all values of the last hidden layer, and all new weights, to every block.
#pragma once
#include "loss.cuh"

INLINE u32 exchange_barrier(int exchange, u32 count) { return AT_BARRIERS + (exchange * 2 + (count & 1)) * 8; }

// Where the owner of a row stores partial outputs: [sending block][row][unit].
template <class L> INLINE u32 partial_output_at(u32 from, u32 own_row, u32 unit) { return L::AT_PARTS + ((from * ROWS_PER_BLOCK + own_row) * L::UNITS + unit) * 4; }

// Sends four outputs of a row to its owner.
template <class L, class H> INLINE void send_four(const Context& c, u32 row, u32 unit, float a, float b, float d, float e) {
  const u32 four[4] = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(d), __float_as_uint(e)}, there = at_block(c.shared, row / ROWS_PER_BLOCK);
  if (!stays_silent(c)) send(there + partial_output_at<L>(c.rank, row % ROWS_PER_BLOCK, unit), four, there + exchange_barrier(H::OUT_EXCHANGE, c.passes));
}
// For a block with one tile of the last hidden layer: its values are multiplied in registers, as soon as they are finished.
template <class L, class H> struct ToOwners {
  static_assert(H::N_TILES == 1 && L::N_TILES % 2 == 0, "a tile's values are one operand");
  const Context& c;
  u32 right[PLANES][L::N_TILES];
  INLINE ToOwners(const Context& context) : c(context) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
      for (int n = 0; n < L::N_TILES; n += 2) {
        u32 words[2];
        load_transposed(c.shared + L::AT_BACK + (plane * L::N_TILES + n) * 128 + (c.lane & 15) * 16, words);
        right[plane][n] = words[0], right[plane][n + 1] = words[1];
      }
  }
  INLINE void operator()(int row_tile, int, int half, const u32 (&words)[1][PLANES]) const {
    const bool odd = c.q & 1;
#pragma unroll
    for (int n = 0; n < L::N_TILES; n += 2) {
      float sum[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        clear(sum[i]);
#pragma unroll
        for (int other = 0; other < PLANES; ++other)
#pragma unroll
          for (int plane = 0; plane + other < PLANES; ++plane) {
            const u32 left[4] = {words[0][plane], 0, 0, 0};  // eight of 16 rows, eight of 16 inputs
            multiply_add(sum[i], left, right[other][n + i], 0);
          }
      }
      // An even lane sends four outputs of the first tile, an odd lane four of the second.
      const float a = __shfl_xor_sync(~0u, odd ? sum[0][0] : sum[1][0], 1), b = __shfl_xor_sync(~0u, odd ? sum[0][1] : sum[1][1], 1);
      const u32 row = row_tile * 16 + half * 8 + c.g, unit = (n + odd) * 8 + (c.q & 2) * 2;
      if (odd) send_four<L, H>(c, row, unit, a, b, sum[1][0], sum[1][1]);
      else send_four<L, H>(c, row, unit, sum[0][0], sum[0][1], a, b);
    }
  }
};
// For other blocks. L: the last layer, H: the layer before it. A warp takes a tile of 16 rows by eight outputs.
template <class L, class H> INLINE void send_partial_outputs(Context& c) {
  constexpr int TILES = ROW_TILES * L::N_TILES;
  __syncthreads();  // all values of the block are stored
#pragma unroll 1
  for (int tile = c.warp; tile < TILES; tile += WARPS) {
    const int m = tile / L::N_TILES, n = tile % L::N_TILES;
    float sum[4];
    clear(sum);
#pragma unroll
    for (int k_tile = 0; k_tile < (H::N_TILES + 1) / 2; ++k_tile) {
      const bool whole = k_tile * 2 + 1 < H::N_TILES;  // otherwise one tile of eight inputs alone
      u32 left[PLANES][4];
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        load_matrices(c.shared + H::AT_OWN + ((plane * ROW_TILES + m) * H::N_TILES + k_tile * 2) * 256 + c.lane * 16, left[plane]);
        if (!whole) left[plane][2] = left[plane][3] = 0;
      }
#pragma unroll
      for (int right = 0; right < PLANES; ++right) {
        u32 words[2];
        const int input_tile = k_tile * 2 + (whole ? (c.lane >> 3) & 1 : 0);
        load_transposed(c.shared + L::AT_BACK + ((right * H::N_TILES + input_tile) * L::N_TILES + n) * 128 + (c.lane & 7) * 16, words);
        if (!whole) words[1] = 0;
#pragma unroll
        for (int plane = 0; plane + right < PLANES; ++plane) multiply_add(sum, left[plane], words[0], words[1]);
      }
    }
    // A lane sends four outputs of a row: an even lane of its upper row, an odd lane of its lower row.
    const bool odd = c.q & 1;
    const float a = __shfl_xor_sync(~0u, odd ? sum[0] : sum[2], 1), b = __shfl_xor_sync(~0u, odd ? sum[1] : sum[3], 1);
    const u32 row = m * 16 + odd * 8 + c.g, unit = n * 8 + (c.q & 2) * 2;
    send_four<L, H>(c, row, unit, odd ? a : sum[0], odd ? b : sum[1], odd ? sum[2] : a, odd ? sum[3] : b);
  }
}

// The biases of a lane's outputs, read before the wait.
template <class L> struct OutputBias {
  float of[L::N_TILES / 2];
  INLINE OutputBias(const Context& c) {
#pragma unroll
    for (int i = 0; i < L::N_TILES / 2; ++i) of[i] = load_float(c.shared + L::AT_BIAS + (i * 16 + (c.lane & 15)) * 4);
  }
};
// A warp takes one row at a time. Each half of the warp adds up the sums of every other block; then both halves have the row, and
// each lane sends the gradients of eight outputs to one block.
template <class L, class H> INLINE void finish_outputs(Context& c, const Draw& draw, const Tally& tally, const OutputBias<L>& bias) {
  static_assert(BLOCKS <= 16, "two lanes send to a block");
  constexpr int COUNT = L::N_TILES / 2, PARTS_PER_HALF = (BLOCKS + 1) / 2;
  if (c.warp >= SCORE_WARPS) return;
  const u32 half = c.lane >> 4, place = c.lane & 15, to = c.lane >> 1;
  const u32 barrier = exchange_barrier(L::LAST_EXCHANGE, c.passes), there = at_block(c.shared, to < BLOCKS ? to : 0);
  float loss = 0.f;
  u32 correct = 0;
#pragma unroll 1
  for (u32 own = c.warp; own < ROWS_PER_BLOCK; own += SCORE_WARPS) {
    const u32 row = c.rank * ROWS_PER_BLOCK + own;
    if (ROWS_PER_BLOCK * BLOCKS != ROWS && row >= ROWS) break;
    const bool real = row < tally.rows;
    float z[COUNT], slope[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const u32 unit = i * 16 + place, first = c.shared + partial_output_at<L>(half, own, unit);
      float part[PARTS_PER_HALF];
#pragma unroll
      for (int k = 0; k < PARTS_PER_HALF; ++k) part[k] = BLOCKS % 2 == 0 || k * 2 + half < BLOCKS ? load_float(first + k * (2 * ROWS_PER_BLOCK * L::UNITS * 4)) : 0.f;
#pragma unroll
      for (int stride = 1; stride < PARTS_PER_HALF; stride *= 2)
#pragma unroll
        for (int k = 0; k + stride < PARTS_PER_HALF; k += 2 * stride) part[k] += part[k + stride];
      float one[1] = {part[0] + __shfl_xor_sync(~0u, part[0], 16) + bias.of[i]}, its_slope[1] = {1.f};
      L::chain(one, its_slope, draw, draw.row + row, unit);
      z[i] = one[0], slope[i] = its_slope[0];
    }
    Result result = row_loss(HalfWarp<L::N_TILES>{z, c.lane}, tally.targets + row * (TARGET_WORDS * 4), tally.smoothing, real ? weighted(tally.row_weight, tally, row) : 0.f);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float d = real ? z[i] * slope[i] : 0.f;  // not a multiplication by 0: an overflow times 0 is NaN
      u32 words[PLANES];
      split(d, __shfl_down_sync(~0u, d, 1), words);  // valid in even lanes
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        u32 eight[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) eight[k] = __shfl_sync(~0u, words[plane], (c.lane & 1) * 8 + k * 2);
        if (to < BLOCKS) send(there + L::AT_DELTA + ((plane * ROW_TILES + row / 16) * L::N_TILES + i * 2 + (c.lane & 1)) * 256 + row % 16 * 16, eight, there + barrier);
      }
    }
    settle(HalfWarp<L::N_TILES>{z, c.lane}, result);
    loss += real && half == 0 ? weighted(result.loss, tally, row) : 0.f;
    correct += real && half == 0 ? result.correct : 0;
    if (SCORE_WARPS == ROWS_PER_BLOCK) break;
  }
  loss = column_sum(quad_sum(loss));
  const u32 score[4] = {__float_as_uint(loss), __reduce_add_sync(~0u, correct), 0, 0}, first = at_block(c.shared, 0);
  if (c.lane == 0) send(first + AT_LOSSES + (c.rank * SCORE_WARPS + c.warp) * 16, score, first + barrier);
}

// The gradient of the last layer's bias over all rows: a product with ones.
template <class L> INLINE void sum_output_deltas(const Context& c) {
  constexpr u32 ONE = IS_BF16 ? 0x3F803F80u : 0x3C003C00u;
  const int n = WARPS - 1 - (int)c.warp;  // the first warps are busy
  if (!L::BIAS || n >= L::N_TILES) return;
  const u32 ones[4] = {ONE, ONE, ONE, ONE};
  float sum[4];
  clear(sum);
#pragma unroll(ROW_TILES <= 4 ? ROW_TILES : 2)
  for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
      u32 right[2];
      read_delta<L>(c, plane, m, n, right);
      multiply_add(sum, ones, right[0], right[1]);
    }
  if (c.g == 0) store_shared(c.shared + L::AT_BIAS_SUMS + (n * 8 + c.q * 2) * 4, sum[0], sum[1]);
}
