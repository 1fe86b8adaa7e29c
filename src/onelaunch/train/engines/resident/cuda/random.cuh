// The random numbers of a run, as onelaunch/rng.py defines them: Philox4x32-10, and the Feistel network of the row order.
#pragma once
#include "base.cuh"

INLINE void philox(u32 (&c)[4], u64 seed) {
  u32 key0 = (u32)seed, key1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u32 high0 = __umulhi(c[0], 0xD2511F53u), low0 = c[0] * 0xD2511F53u;
    u32 high1 = __umulhi(c[2], 0xCD9E8D57u), low1 = c[2] * 0xCD9E8D57u;
    u32 next0 = high1 ^ c[1] ^ key0, next2 = high0 ^ c[3] ^ key1;
    c[0] = next0, c[1] = low1, c[2] = next2, c[3] = low0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
}

// The rows that stand at `place` (one a lane) of an epoch; all lanes of a warp together. Lanes beyond the rows give 0.
INLINE u32 permuted_rows(u64 seed, u64 epoch, u32 place, u32 rows) {
  constexpr u32 RIGHT = PERMUTATION_BITS - PERMUTATION_BITS / 2, LEFT = PERMUTATION_BITS / 2;
  u32 words[4] = {threadIdx.x & 1, (u32)epoch, (u32)(epoch >> 32), 0xFFFFFFFFu}, keys[8];
  philox(words, seed);  // even lanes hold the first four round keys, odd lanes the others
#pragma unroll
  for (int i = 0; i < 8; ++i) keys[i] = __shfl_sync(~0u, words[i & 3], i / 4);
  if (place >= rows) return 0;
  u32 value = place;
  do {
    u32 left = value >> RIGHT, right = value & ((1u << RIGHT) - 1);
#pragma unroll
    for (int round = 0; round < 8; ++round) {
      const u32 width = round & 1 ? RIGHT : LEFT;  // of the half that is replaced: the halves trade places every round
      u32 mixed = (right ^ keys[round]) * 0x85EBCA6Bu;
      mixed ^= mixed >> 13;
      mixed *= 0xC2B2AE35u;
      mixed = (mixed ^ (mixed >> 16)) & ((1u << width) - 1);
      const u32 next = left ^ mixed;
      left = right, right = next;
    }
    value = (left << RIGHT) | right;
  } while (value >= rows);
  return value;
}

// Keep factors of N / 2 rows, eight apart from `row` on, units (unit + 2q, unit + 2q + 1), `unit` a multiple of eight.
template <int N> INLINE void keep_factors(float (&keep)[N], u64 seed, u32 layer, u32 step, u32 row, u32 unit, u32 threshold, float scale) {
  const u32 q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < N / 2; ++half) {
    u32 c[4] = {unit / 8, row + half * 8, step, layer};
    philox(c, seed);
    const u32 bits = q & 2 ? (q & 1 ? c[3] : c[2]) : (q & 1 ? c[1] : c[0]);
    keep[half * 2] = (bits & 0xffffu) < threshold ? scale : 0.f;
    keep[half * 2 + 1] = (bits >> 16) < threshold ? scale : 0.f;
  }
}
