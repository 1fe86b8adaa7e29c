// The summed weights of the rows of each batch: a kernel that runs before the training, since a step needs the sum of all of its rows
// before its first gradient. A warp takes a step at a time and adds in a fixed order, in double precision.
#pragma once
#include "train.cuh"

// `keys`: shared address of eight words of the warp. Warp `first` of `warps` takes steps first, first + warps, … of the launch.
INLINE void sum_weights_of(const Params* p, u32 keys, u32 first, u32 warps) {
  constexpr u32 ROWS_AT_ONCE = 4;  // per lane
  const u32 lane = threadIdx.x & 31, each = (u32)p->steps_per_epoch;
  for (u64 number = first; number < p->last_step - p->first_step; number += warps) {
    const u64 step = p->first_step + number;
    const u32 place = (u32)(step % each), rows = rows_at(p, place);
    if (lane < 2) {
      u32 words[4];
      permutation_keys(p->seed, step / each, lane, words);
#pragma unroll
      for (int k = 0; k < 4; ++k) store_word(keys + (lane * 4 + k) * 4, words[k]);
    }
    __syncwarp();
    double sum = 0;
    for (u32 row = lane; row < rows; row += 32 * ROWS_AT_ONCE) {
      u32 value[ROWS_AT_ONCE];
#pragma unroll
      for (int k = 0; k < ROWS_AT_ONCE; ++k) value[k] = row + k * 32 < rows ? place * BATCH + row + k * 32 : ~0u;
      permute_rows(value, keys, (u32)p->rows, PERMUTATION_BITS ? PERMUTATION_BITS : (u32)p->permutation_bits);
#pragma unroll
      for (int k = 0; k < ROWS_AT_ONCE; ++k) {
        if (row + k * 32 >= rows) break;
        const u32 from = MEMBERS && p->row_numbers ? p->row_numbers[value[k]] : value[k];
        sum += (double)__uint_as_float(p->y[(u64)from * TARGET_WORDS + TARGET_WORDS - 1]);
      }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (lane == 0) p->batch_weights[number] = sum;
    __syncwarp();  // all lanes have read the keys
  }
}

#if MEMBERS
extern "C" __global__ void __launch_bounds__(256) sum_weights(const __grid_constant__ Queue queue) {
  const u32 count = (u32)queue.count, block = blockIdx.x / count, blocks = gridDim.x / count;  // of a member
  const Params* p = queue.members + blockIdx.x % count;
#else
extern "C" __global__ void __launch_bounds__(256) sum_weights(const __grid_constant__ Params params) {
  const u32 block = blockIdx.x, blocks = gridDim.x;
  const Params* p = &params;
#endif
  __shared__ u32 keys[8 * 8];
  const u32 warp = threadIdx.x >> 5;
  sum_weights_of(p, shared_address((u8*)(keys + warp * 8)), block * 8 + warp, blocks * 8);
}
