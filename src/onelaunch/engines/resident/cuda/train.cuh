// The run: rows fetched ahead, tables for the coming steps, the poll of the host, epochs and their validation.
#pragma once
#if SUMS_OUTPUTS
#include "summed_outputs.cuh"
#else
#include "loss.cuh"
#endif

// The rows of a pass in shared memory, uint8 or 16-bit numbers. Their copy is in flight while the pass before computes.
template <class L> struct Inputs {
  static constexpr int CHUNKS = L::K_TILES * X_BYTES;  // of 16 bytes per row
  INLINE static u32 buffer_at(const Context& c, u32 buffer) { return c.shared + AT_X + buffer * X_BUFFER_BYTES; }
  INLINE static u32 targets_at(const Context& c, u32 buffer) { return c.shared + AT_TARGETS + buffer * (ROWS * TARGET_WORDS * 4); }

  // Chips with bulk copies fetch a row with one instruction, and one barrier per buffer counts the bytes as they arrive.
#if BULK
  INLINE static u32 barrier_at(const Context& c, u32 buffer) { return c.shared + AT_ROW_BARRIERS + buffer * 8; }
  // Orders the zeros that this thread has written before the bulk copies.
  INLINE static void clear_is_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  INLINE static void make_barriers(const Context& c) {
    if (threadIdx.x >= X_BUFFERS) return;
    make_barrier(barrier_at(c, threadIdx.x), WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
#else
  INLINE static void clear_is_done() {}
  INLINE static void make_barriers(const Context&) {}
#endif
  // `number(row)`: the row of x and y at position `row` of the pass; any row for padding. A warp fetches ROWS_PER_WARP rows.
  template <class Number> INLINE static void fetch(const Context& c, u32 buffer, const u8* x, const u32* y, u64 plane_bytes, Number number) {
    constexpr int ROWS_PER_WARP = ROWS / WARPS;
    auto to = [&](u32 row, int plane) { return buffer_at(c, buffer) + (plane * ROWS + row) * X_SHARED_PITCH; };
#if BULK
    static_assert(ROWS_PER_WARP <= 32, "a lane takes a row");
    if (c.lane == 0) expect_bytes(barrier_at(c, buffer), ROWS_PER_WARP * X_PLANES * CHUNKS * 16);
    // Where blocks fetch for all, a block fetches rows rank, rank + BLOCKS, …; otherwise a warp fetches ROWS_PER_WARP rows for its block.
    const u32 row = MULTICASTS_ROWS ? (c.lane * WARPS + c.warp) * BLOCKS + c.rank : c.warp * ROWS_PER_WARP + c.lane;
    if (MULTICASTS_ROWS ? row < ROWS : c.lane < ROWS_PER_WARP) {
      const u8* from = x + number(row) * X_PITCH;
#pragma unroll
      for (int plane = 0; plane < X_PLANES; ++plane) copy_bulk(to(row, plane), from + plane * plane_bytes, CHUNKS * 16, barrier_at(c, buffer));
    }
#else
#pragma unroll(ROWS_PER_WARP <= 8 ? ROWS_PER_WARP : 2)
    for (u32 i = 0; i < ROWS_PER_WARP; ++i) {
      const u32 row = c.warp * ROWS_PER_WARP + i;
      const u8* from = x + number(row) * X_PITCH;
#pragma unroll
      for (int plane = 0; plane < X_PLANES; ++plane)
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk += 32)
          if (chunk + 32 <= CHUNKS || chunk + c.lane < CHUNKS)
            copy_16_bytes(to(row, plane) + (chunk + c.lane) * 16, from + plane * plane_bytes + (chunk + c.lane) * 16);
    }
#endif
    constexpr u32 WORDS = ROWS * TARGET_WORDS;
#pragma unroll(WORDS <= 4 * THREADS ? 4 : 1)
    for (u32 first = 0; first < WORDS; first += THREADS) {
      const u32 word = first + threadIdx.x;
      if (first + THREADS <= WORDS || word < WORDS)
        copy_4_bytes(targets_at(c, buffer) + word * 4, y + number(word / TARGET_WORDS) * TARGET_WORDS + word % TARGET_WORDS);
    }
    copies_issued();
  }
  // All threads wait until the rows of this pass have arrived.
  INLINE static void arrive(Context& c, u32 buffer) {
    copies_done();
#if BULK
    await_phase(c, barrier_at(c, buffer), c.passes / X_BUFFERS & 1, EXCHANGES);
#endif
    __syncthreads();
  }
  // A lane's address for `ldmatrix`: the rows of a tile, 16 bytes at `chunk`; two blocks of eight rows, then those of the next chunk.
  INLINE static u32 at(const Context& c, u32 buffer, int m, int chunk, int plane) {
    return buffer_at(c, buffer) + (plane * ROWS + m * 16 + (c.lane & 15)) * X_SHARED_PITCH + chunk * 16;
  }
  INLINE static void read(const Context& c, u32 buffer, int m, int k, int plane, u32 (&left)[4]) { read_k_tile(c, buffer, m, k * WARPS + c.warp, plane, left); }
  INLINE static void read_transposed(const Context& c, u32 buffer, int m, int k, int plane, u32 (&left)[4]) { read_k_tile_transposed(c, buffer, m, k * WARPS + c.warp, plane, left); }
  INLINE static void read_k_tile(const Context& c, u32 buffer, int m, int k_tile, int plane, u32 (&left)[4]) {
    if constexpr (X_BYTES == 2) {
      load_matrices(at(c, buffer, m, k_tile * 2 + (c.lane >> 4), plane), left);
    } else {  // a lane has bytes 4q to 4q + 3 of its rows: in the k tile the even bytes come first, then the odd ones
      u32 bytes[2];
      load_matrices(at(c, buffer, m, k_tile, plane), bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) left[half] = widened(__byte_perm(bytes[half], 0, 0x4240)), left[2 + half] = widened(__byte_perm(bytes[half], 0, 0x4341));
    }
  }
  INLINE static void read_k_tile_transposed(const Context& c, u32 buffer, int m, int k_tile, int plane, u32 (&left)[4]) {
    if constexpr (X_BYTES == 2) {
      const u32 lane = transposed_lane(c.lane);
      load_transposed(buffer_at(c, buffer) + (plane * ROWS + m * 16 + (lane & 15)) * X_SHARED_PITCH + (k_tile * 2 + (lane >> 4)) * 16, left);
    } else {  // bytes 2g and 2g + 1 of rows 2q and 2q + 1
      u32 bytes[2];
      load_transposed(at(c, buffer, m, k_tile, plane), bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) left[2 * half] = widened(__byte_perm(bytes[half], 0, 0x4240)), left[2 * half + 1] = widened(__byte_perm(bytes[half], 0, 0x4341));
    }
  }
  // Two bytes in 16-bit lanes as numbers: bf16 u * 2^-6 (the bits of u are u * 2^-133 in bf16), fp16 u.
  INLINE static u32 widened(u32 bytes) {
    u32 out;
    if constexpr (IS_BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(bytes), "r"(0x7F007F00u), "r"(0x80008000u));
    else asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(bytes | 0x64006400u), "r"(0x64006400u));
    return out;
  }
};

INLINE double learning_rate(const Params* p, double step) {
  const double total = (double)p->total_steps;
  if constexpr (SCHEDULE == LINEAR) return p->lr * (1 - step / total);
  if constexpr (SCHEDULE == COSINE) return p->lr * (1 + cospi(step / total)) / 2;
  if constexpr (SCHEDULE == ONE_CYCLE) {  // as in run/schedule.py, where the four constants are
    if (total < MIN_ONE_CYCLE_STEPS) return p->lr * (1 + cospi(step / total)) / 2;
    const double start = p->lr / START_DIVISOR, peak = WARM_UP * total - 1;
    const bool rising = step <= peak;
    const double begin = rising ? start : p->lr, end = rising ? p->lr : start / FINAL_DIVISOR;
    const double way = rising ? (peak != 0 ? step / peak : 0.0) : (step - peak) / (total - 1 - peak);
    return end + (begin - end) / 2 * (1 + cospi(way));
  }
  return p->lr;
}

// Rows of the step at position `place` of its epoch.
INLINE u32 rows_at(const Params* p, u32 place) {
  const u32 left = (u32)p->rows - place * BATCH;
  return left < BATCH ? left : BATCH;
}

// Fills the table of learning rates for steps [step, step + INTERVAL).
INLINE void fill_rates(const Context& c, u64 step) {
  const Params* p = c.p;
  const u32 each = (u32)p->steps_per_epoch, first = (u32)(step % each);
  __syncthreads();
  for (u32 i = threadIdx.x; i < INTERVAL; i += THREADS) {
    const double now = (double)(step + i), lr = learning_rate(p, now);
    float row[4] = {(float)lr, 1.f, 1.f, 0.f};
    if constexpr (BIAS_CORRECTION) {
      row[0] = (float)(lr / -expm1((now + 1) * p->log_beta1));
      row[1] = (float)(1 / sqrt(-expm1((now + 1) * p->log_beta2)));
    }
    if constexpr (OPTIMIZER != SGD) row[2] = (float)(1 - lr * p->weight_decay);  // for decoupled weight decay
    if constexpr (WEIGHTED) {
      const u64 number = step - p->first_step + i;
      const double sum = number < p->last_step - p->first_step ? p->batch_weights[number] : 0.;
      row[3] = sum > 0 ? (float)(1 / (sum * LOSS_UNITS)) : 0.f;
    } else {
      row[3] = 1.f / ((float)rows_at(p, (first + i) % each) * LOSS_UNITS);
    }
    store_shared(c.shared + AT_RATES + i * 16, row);
  }
  __syncthreads();
}
// Address of this block's row numbers for a micro-batch of a step. There are two tables of STEPS_PER_ROW_TABLE steps each.
INLINE u32 row_table(const Context& c, u32 step, u32 micro) { return c.shared + AT_ROWS + (step % (2 * STEPS_PER_ROW_TABLE) * TABLE_ROWS + micro * ROWS) * 4; }
// Fills the table that begins with `step`, a multiple of STEPS_PER_ROW_TABLE.
INLINE void find_rows(const Context& c, u64 step) {
  const u32 each = (u32)c.p->steps_per_epoch, first = (u32)(step % each);
  const u64 epoch = step / each;
  __syncthreads();
  for (u32 i = threadIdx.x; i < 2 * STEPS_PER_ROW_TABLE; i += THREADS) {
    u32 keys[4];
    permutation_keys(c.p->seed, epoch + (first + i / 2) / each, i & 1, keys);
#pragma unroll
    for (int k = 0; k < 4; ++k) store_word(c.shared + AT_KEYS + (i * 4 + k) * 4, keys[k]);
  }
  __syncthreads();
  constexpr u32 ROWS_AT_ONCE = TABLE_ROWS % 4 == 0 ? 4 : TABLE_ROWS % 2 == 0 ? 2 : 1;  // of one step
  for (u32 i = threadIdx.x * ROWS_AT_ONCE; i < STEPS_PER_ROW_TABLE * TABLE_ROWS; i += THREADS * ROWS_AT_ONCE) {
    const u32 of = i / TABLE_ROWS, row = i % TABLE_ROWS;
    u32 value[ROWS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; ++k) {
      const u32 in_batch = ROW_PARTITIONS == 1 ? row + k : ((row + k) / ROWS * ROW_PARTITIONS + c.rank) * ROWS + (row + k) % ROWS;
      value[k] = in_batch < BATCH ? (first + of) % each * BATCH + in_batch : ~0u;
    }
    permute_rows(value, c.shared + AT_KEYS + of * 32, (u32)c.p->rows, PERMUTATION_BITS ? PERMUTATION_BITS : (u32)c.p->permutation_bits);
    if constexpr (MEMBERS)
      if (c.p->row_numbers)
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; ++k) value[k] = c.p->row_numbers[value[k]];
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; ++k) store_word(row_table(c, (u32)step, 0) + (i + k) * 4, value[k]);
  }
  __syncthreads();
}
INLINE u32 micro_rows(u32 all, u32 micro) { return all <= micro * ROWS ? 0 : all - micro * ROWS < ROWS ? all - micro * ROWS : ROWS; }

// Reports progress to the host and asks whether the run goes on; the answer is the same in every block.
INLINE bool poll_host(Context& c, u32 count, u64 step) {
  u32 word = 0;
  if (c.rank == 0 && c.warp == 0) {
    if (c.lane == 0) {
      volatile Control* control = c.p->control;
      control->loss = c.p->losses[c.step - 1];
      control->correct = load_word(c.shared + AT_CORRECT);
      __threadfence_system();
      control->done = (u32)step;
      word = load_word(c.shared + AT_BROKEN) || control->stop;
    }
    word = __shfl_sync(~0u, word, 0);
  }
  return agreed(c, count, word) == 0;
}
// The record of an epoch, by one thread per block: correct predictions in training, then the results of the validation.
INLINE void begin_record(const Context& c, u32 index) {
  if (c.rank == 0) c.p->records[index].correct = load_word(c.shared + AT_CORRECT);
  store_word(c.shared + AT_CORRECT, 0);
  store_shared(c.shared + AT_VALIDATION_LOSS, 0u, 0u);
}
INLINE void add_validation_loss(const Context& c, float loss) {
  double* sum = (double*)__cvta_shared_to_generic(c.shared + AT_VALIDATION_LOSS);
  if (c.lane == 0) *sum += loss;
}
INLINE void end_record(const Context& c, u32 index) {
  if (c.rank != 0) return;
  Record* record = c.p->records + index;
  record->validation_loss = *(const double*)__cvta_shared_to_generic(c.shared + AT_VALIDATION_LOSS);
  record->validation_correct = load_word(c.shared + AT_CORRECT);
  store_word(c.shared + AT_CORRECT, 0);
  __threadfence_system();
  *(volatile u32*)&c.p->control->epochs = index + 1;
}
// The loss of a pass, for block 0; it also adds the correct predictions at AT_CORRECT. For one warp.
INLINE float sum_of_losses(const Context& c) {
  float sum = 0.f;
#if SUMS_OUTPUTS
  if (c.rank != 0) return sum;
  u32 correct = 0;
#pragma unroll
  for (u32 i = 0; i < BLOCKS * SCORE_WARPS; i += 32) {
    float score[2] = {0.f, 0.f};
    if (i + c.lane < BLOCKS * SCORE_WARPS) load_shared(c.shared + AT_LOSSES + (i + c.lane) * 16, score);
    sum += score[0], correct += __float_as_uint(score[1]);
  }
  sum = column_sum(quad_sum(sum)), correct = __reduce_add_sync(~0u, correct);
  if (c.lane == 0) store_word(c.shared + AT_CORRECT, load_word(c.shared + AT_CORRECT) + correct);
#else
#pragma unroll
  for (int warp = 0; warp < LOSS_WARPS; ++warp) sum += load_float(c.shared + AT_LOSSES + warp * 4);
#endif
  return sum;
}
