// The run: rows fetched ahead, tables of the coming steps, the look at the host, epochs and their evaluation.
#pragma once
#include "loss.cuh"

// Rows of the next pass on their way into shared memory, each thread's own pieces: no barrier is needed to read them.
// A piece is the four values of a row that a lane needs of a step of 16 inputs.
template <class L> struct Inputs {
  static constexpr int PIECE = 4 * X_BYTES;
  INLINE static u32 at(const Context& c, u32 buffer, int m, int half, int ks, int plane) {
    return c.shared + AT_X + buffer * X_BUFFER_BYTES + ((((plane * ROW_TILES + m) * 2 + half) * L::KS + ks) * THREADS + threadIdx.x) * PIECE;
  }
  INLINE static void fetch(const Context& c, u32 buffer, const u8* x, u64 plane_bytes, u32 row_table, u64 first_row, u32 rows) {
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row = m * 16 + c.g + half * 8;
        const u64 number = row < rows ? (row_table ? load_word(row_table + row * 4) : first_row + row) : first_row;
        const u8* from = x + number * X_PITCH + c.q * PIECE;
#pragma unroll
        for (int ks = 0; ks < L::KS; ++ks)
          if (Weights<L>::mine(c, ks))
#pragma unroll
            for (int plane = 0; plane < X_PLANES; ++plane)
              copy_async<PIECE>(at(c, buffer, m, half, ks, plane), from + plane * plane_bytes + (ks * WARPS + c.warp) * 4 * PIECE);
      }
    copies_issued();
  }
  INLINE static void read(const Context& c, u32 buffer, int m, int ks, int plane, u32 (&left)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (X_BYTES == 2) {
        u32 words[2];
        load_shared(at(c, buffer, m, half, ks, plane), words);
        left[half] = words[0], left[2 + half] = words[1];
      } else {
        const u32 word = load_word(at(c, buffer, m, half, ks, plane));
        left[half] = widened(__byte_perm(word, 0, 0x4140)), left[2 + half] = widened(__byte_perm(word, 0, 0x4342));
      }
    }
  }
  // Two bytes in 16-bit halves as numbers: bf16 u * 2^-6 (the byte is u * 2^-133 as it stands), fp16 u.
  INLINE static u32 widened(u32 bytes) {
    u32 out;
    if constexpr (HALF_IS_BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(bytes), "r"(0x7F007F00u), "r"(0x80008000u));
    else asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(bytes | 0x64006400u), "r"(0x64006400u));
    return out;
  }
};

INLINE double learning_rate(const Params* p, double step) {
  const double total = (double)p->total_steps;
  if constexpr (SCHEDULE == LINEAR) return p->lr * (1 - step / total);
  if constexpr (SCHEDULE == COSINE) return p->lr * (1 + cospi(step / total)) / 2;
  if constexpr (SCHEDULE == ONE_CYCLE) {
    const double start = p->lr / 25.0, peak = 0.3 * total - 1;
    const bool rising = step <= peak;
    const double begin = rising ? start : p->lr, end = rising ? p->lr : start / 1e4;
    const double way = rising ? (peak != 0 ? step / peak : 0.0) : (step - peak) / (total - 1 - peak);
    return end + (begin - end) / 2 * (1 + cospi(way));
  }
  return p->lr;
}

INLINE u32 rows_of(const Params* p, u64 step) {
  const u64 first = step % p->steps_per_epoch * BATCH;
  return p->rows - first < BATCH ? (u32)(p->rows - first) : BATCH;
}

// Learning rates of steps [step, step + INTERVAL) and row numbers of steps [step, step + INTERVAL].
INLINE void fill_tables(const Context& c, u64 step) {
  const Params* p = c.p;
  __syncthreads();
  for (u32 i = threadIdx.x; i < 2 * (INTERVAL + 1); i += THREADS) {
    u32 keys[4];
    permutation_keys(p->seed, (step + i / 2) / p->steps_per_epoch, i & 1, keys);
    for (int k = 0; k < 4; ++k) store_word(c.shared + AT_KEYS + (i * 4 + k) * 4, keys[k]);
  }
  for (u32 i = threadIdx.x; i < INTERVAL; i += THREADS) {
    const double now = (double)(step + i), lr = learning_rate(p, now);
    float row[4] = {(float)lr, 1.f, 1.f, 0.f};
    if constexpr (OPTIMIZER != SGD) {
      row[0] = (float)(lr / -expm1((now + 1) * p->log_beta1));
      row[1] = (float)(1 / sqrt(-expm1((now + 1) * p->log_beta2)));
      row[2] = (float)(1 - lr * p->weight_decay);
    }
    row[3] = 1.f / ((float)rows_of(p, step + i) * LOSS_UNITS);
    store_shared(c.shared + AT_RATES + i * 16, row);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < (INTERVAL + 1) * BATCH; i += THREADS) {
    const u64 place = (step + i / BATCH) % p->steps_per_epoch * BATCH + i % BATCH;
    const u32 row = place < p->rows ? permuted_row((u32)place, c.shared + AT_KEYS + i / BATCH * 32, (u32)p->rows) : 0;
    store_word(c.shared + AT_ROWS + i * 4, row);
  }
  __syncthreads();
}
INLINE u32 row_table(const Context& c, u64 step, u64 table_step, u32 micro) {
  return c.shared + AT_ROWS + ((u32)(step - table_step) * BATCH + micro * ROWS) * 4;
}
INLINE u32 micro_rows(const Params* p, u64 step, u32 micro) {
  const u32 all = rows_of(p, step), before = micro * ROWS;
  return all <= before ? 0 : (all - before < ROWS ? all - before : ROWS);
}

// What the host sees of the run, and whether it goes on: every INTERVAL steps, the same answer in every block.
INLINE bool look(Context& c, u32 count, u64 step, float loss, bool broken) {
  u32 word = 0;
  if (c.rank == 0 && c.warp == 0) {
    if (c.lane == 0) {
      volatile Control* control = c.p->control;
      control->loss = loss;
      control->correct = load_word(c.shared + AT_CORRECT);
      __threadfence_system();
      control->done = (u32)step;
      word = broken || control->stop;
    }
    word = __shfl_sync(~0u, word, 0);
  }
  return agreed(c, count, word) == 0;
}
INLINE void record_epoch(Context& c, u32 index, double check_loss, u64 check_correct) {
  if (c.rank != 0 || threadIdx.x != 0) return;
  Record* record = c.p->records + index;
  record->check_loss = check_loss;
  record->check_correct = check_correct;
  record->correct = load_word(c.shared + AT_CORRECT);
  store_word(c.shared + AT_CORRECT, 0);
  __threadfence_system();
  *(volatile u32*)&c.p->control->epochs = index + 1;
}
INLINE float sum_of_losses(const Context& c) {
  float sum = 0.f;
  for (int m = 0; m < ROW_TILES; ++m) sum += load_float(c.shared + AT_LOSSES + m * 4);
  return sum;
}
