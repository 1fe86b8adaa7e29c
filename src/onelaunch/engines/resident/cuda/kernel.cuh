// The kernel: one launch trains from `first_step` to `last_step`. The plan generates the phases of a pass and the layers' weights
// (FORWARD_PHASES, BACKWARD_PHASES, …_WEIGHTS). They use `c`, `draw`, `tally`, `buffer()`, `trained` and `fetch_next` from here.
// LATE_UPDATE is an update made in the next pass, while that pass waits for other blocks: `late` is set until it is made, and
// `late_rates` are the rates of its step.
#pragma once
#if BY_ROWS
#include "rows_update.cuh"
#else
#include "train.cuh"
#endif
#if MEMBERS
#include "members.cuh"
#endif
#if WEIGHTED
#include "batch_weights.cuh"
#endif

#if STAMPS  // clocks that thread 0 of block 0 spends in each phase
#define STAMP(i) if (threadIdx.x == 0) { const u32 now = (u32)clock_now(); spent[i] += now - stamped; stamped = now; }
#else
#define STAMP(i)
#endif

// One run, by all threads of a block or of a cluster; returns whether it ended without a fault.
INLINE bool train_run(const Params* p, u32 shared) {
  Context c;
  c.p = p, c.lane = threadIdx.x & 31, c.warp = threadIdx.x >> 5, c.g = c.lane >> 2, c.q = c.lane & 3;
  c.rank = rank_of_block(), c.shared = shared;
  c.passes = c.backs = c.step = c.turn = 0, c.dead = false;
  for (u32 i = threadIdx.x; i < RUN_BYTES / 4; i += THREADS) store_word(c.shared + i * 4, 0);
  Inputs<Layer0>::clear_is_done();
#if STAMPS
  __shared__ u32 spent[PHASES];
  for (u32 i = threadIdx.x; i < PHASES; i += THREADS) spent[i] = 0;
  u32 stamped = (u32)clock_now();
#endif
  __syncthreads();
  Inputs<Layer0>::make_barriers(c);  // used after one more barrier of the block
#if IS_CLUSTER
  for (u32 i = 0; i < (BLOCKS + 3) / 4; ++i) c.remote[i] = at_block(c.shared, i * 4 + c.q < BLOCKS ? i * 4 + c.q : 0);
  make_barriers(c);
  sync_cluster();
#endif
  DECLARE_WEIGHTS
  LOAD_WEIGHTS
  __syncthreads();
  SEND_WEIGHTS

  const Rule rule = {(float)p->momentum, (float)p->weight_decay, (float)p->new_mean, (float)p->new_square, (float)p->beta2, (float)p->eps};
  const float smoothing = LABEL_SMOOTHING ? (float)p->label_smoothing : 0.f;
  bool late = false;
  Rates late_rates = {0.f, 0.f, 0.f, 0.f};
  const u32 partition = ROW_PARTITIONS == 1 ? 0 : c.rank;  // which part of a micro-batch's rows this block has
  // Values that follow from the counts of steps and passes are recomputed, not kept: the registers are for weights.
  auto step = [&]() { return p->first_step + c.step; };
  auto place = [&]() { return (u32)step() % (u32)p->steps_per_epoch; };  // position of the step in its epoch
  auto buffer = [&]() { return c.passes & (X_BUFFERS - 1); };
  auto other = [&]() { return ~c.passes & (X_BUFFERS - 1); };
  auto fetch_into = [&](u32 where, u32 later, u32 micro) {
    const u32 table = row_table(c, (u32)step() + later, micro);
    Inputs<Layer0>::fetch(c, where, p->x, p->y, p->all_rows * X_PITCH, [&](u32 row) { return (u64)load_word(table + row * 4); });
  };
  auto fetch = [&](u32 later, u32 micro) { fetch_into(other(), later, micro); };
  auto validation_rows = [&](u32 part) {
    const u64 left = p->validation_rows - (u64)part * ROWS;
    return (u32)(left < ROWS ? left : ROWS);
  };
  auto fetch_validation = [&](u32 part) {
    const u64 first = (u64)part * ROWS;
    if constexpr (VALIDATES)
      Inputs<Layer0>::fetch(c, other(), p->validation_x, p->validation_y, p->validation_rows * X_PITCH, [&](u32 row) { return row < validation_rows(part) ? first + row : first; });
  };
  auto epoch = [&]() { return (u32)(step() / p->steps_per_epoch - p->first_step / p->steps_per_epoch); };  // within this launch
  // Steps from this one on that only train: until an epoch, the run or a table ends.
  auto count_plain_steps = [&]() {
    u32 steps = min(INTERVAL - c.step % INTERVAL, STEPS_PER_ROW_TABLE - (u32)(step() % STEPS_PER_ROW_TABLE));
    steps = min(steps, (u32)p->steps_per_epoch - place());
    return (u32)min((u64)steps, p->last_step - step());  // the last step of a run is also the last of a launch
  };

  fill_rates(c, step());
  find_rows(c, step() / STEPS_PER_ROW_TABLE * STEPS_PER_ROW_TABLE);
  find_rows(c, step() / STEPS_PER_ROW_TABLE * STEPS_PER_ROW_TABLE + STEPS_PER_ROW_TABLE);
  fetch_into(0, 0, 0);
  // Rare work is at the end of the loop, so that the steps are straight code: a jump over it costs more than the work.
  for (u32 plain_steps = count_plain_steps();;) {
    float scalars[4];
    load_shared(c.shared + AT_RATES + c.step % INTERVAL * 16, scalars);
    const Rates rates = {scalars[0], scalars[1], scalars[2], scalars[3]};
    auto ends = [&]() { return plain_steps <= 1 && (place() + 1 == (u32)p->steps_per_epoch || step() + 1 == p->total_steps); };
    auto continues = [&]() { return plain_steps > 1 || step() + 1 < p->last_step; };
    const u32 rows = plain_steps > 1 ? BATCH : rows_at(p, place()), count = MICRO_BATCHES == 1 ? 1 : (rows + ROWS * ROW_PARTITIONS - 1) / (ROWS * ROW_PARTITIONS);
    float total = 0.f;
#if BY_ROWS
    float gradient[ALL_SLOTS][4];
    Score score = {0.f, 0};
#endif
    STAMP(0)
    for (u32 micro = 0; micro < count; ++micro) {
      constexpr u32 trained = 0;
      const bool last = micro + 1 == count;
      const u32 part = micro * ROW_PARTITIONS + partition;
      const Draw draw = {p->seed, (u32)step(), part * ROWS, true, p->keep};
      const Tally tally = {micro_rows(rows, part), rates.row_weight * LOSS_SCALE, smoothing, Inputs<Layer0>::targets_at(c, buffer())};
      auto fetch_next = [&]() {
        if (!last) fetch(0, micro + 1);
        else if (VALIDATES && ends()) fetch_validation(0);
        else if (continues()) fetch(1, 0);
        else copies_issued();  // an empty group, for code that counts groups of copies
      };
      FORWARD_PHASES
      BACKWARD_PHASES
      ++c.passes, ++c.backs;
    }
    late = true, late_rates = rates;
    if (c.rank == 0 && threadIdx.x == 0) {
      const float loss = total * row_weight(c);
      p->losses[c.step] = loss;
      if (!(fabsf(loss) <= 3.4028235e38f)) store_word(c.shared + AT_BROKEN, 1);
    }
    if (--plain_steps > 0 && !c.dead) {
      ++c.step;
      continue;
    }
    if (ends()) {
      if (threadIdx.x == 0) begin_record(c, epoch());
      for (u32 part = 0; VALIDATES && (u64)part * ROWS < p->validation_rows; ++part) {
        constexpr u32 trained = 1;  // the update of this step has been made
        const Draw draw = {p->seed, 0, 0, false, p->keep};
        const Tally tally = {validation_rows(part), 0.f, smoothing, Inputs<Layer0>::targets_at(c, buffer())};
        auto fetch_next = [&]() {
          if ((u64)(part + 1) * ROWS < p->validation_rows) fetch_validation(part + 1);
          else if (continues()) fetch(1, 0);
        };
#if BY_ROWS
        Score score = {0.f, 0};
        FORWARD_PHASES
        keep_score(c, score);
#else
        FORWARD_PHASES
#endif
        __syncthreads();
        if (X_BUFFERS == 1) fetch_next();
        if (c.warp == 0) add_validation_loss(c, sum_of_losses(c));
        ++c.passes;
      }
      __syncthreads();
      if (threadIdx.x == 0) end_record(c, epoch());
    }
    ++c.step;
    if (c.dead || step() == p->last_step) break;  // the same in the whole block: agreed on with the outputs
    if (step() % STEPS_PER_ROW_TABLE == 0) find_rows(c, step() + STEPS_PER_ROW_TABLE);
    if (c.step % INTERVAL == 0) {
      if (c.step % (TABLES_PER_HOST_POLL * INTERVAL) == 0 && !poll_host(c, c.step / (TABLES_PER_HOST_POLL * INTERVAL) - 1, step())) break;
      fill_rates(c, step());
    }
    plain_steps = count_plain_steps();
  }
  if (step() < p->last_step) Inputs<Layer0>::arrive(c, buffer());  // rows of a step that will not run
  {
    constexpr u32 trained = 0;
    LATE_UPDATE
  }
  __syncthreads();
  SAVE_WEIGHTS
  if (threadIdx.x == 0) report_fault(c);
#if STAMPS
  if (c.rank == 0)
    for (u32 i = threadIdx.x; i < PHASES; i += THREADS) p->stamps[i] = spent[i];
#endif
  if (c.rank == 0 && threadIdx.x == 0) {
    volatile Control* control = p->control;
    control->loss = p->losses[c.step - 1];
    control->correct = load_word(c.shared + AT_CORRECT);
    __threadfence_system();
    control->done = (u32)step();
  }
#if MEMBERS
  AWAIT_LAST_SENDS
  end_member(c);
#elif IS_CLUSTER
  sync_cluster();  // no block exits while another may still send to it
#endif
  return !c.dead;
}

#if MEMBERS
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR) train(const __grid_constant__ Queue queue) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 shared = shared_address(memory);
  const Params* member = (const Params*)(memory + AT_MEMBER + 16);
  while (take_member(queue, shared))
    if (!train_run(member, shared)) close_queue(queue);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) train(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) u8 memory[];
  train_run(&params, shared_address(memory));
}
#endif
