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

// Half (0 or 1) of the eight round keys of an epoch's row order.
INLINE void permutation_keys(u64 seed, u64 epoch, u32 half, u32 (&keys)[4]) {
  keys[0] = half, keys[1] = (u32)epoch, keys[2] = (u32)(epoch >> 32), keys[3] = 0xFFFFFFFFu;
  philox(keys, seed);
}
// The rows at N positions of an epoch, computed together so that their latencies overlap. `value[i]` is a position (or ~0 for
// none) and becomes the row number. `keys`: the shared address of the epoch's round keys. `bits`: of the Feistel network.
template <int N> INLINE void permute_rows(u32 (&value)[N], u32 keys, u32 rows, u32 bits) {
  const u32 RIGHT = bits - bits / 2, LEFT = bits / 2;
  u32 words[8];
  bool walking[N];
#pragma unroll
  for (int round = 0; round < 8; ++round) words[round] = load_word(keys + round * 4);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    walking[i] = value[i] < rows;
    value[i] = walking[i] ? value[i] : 0;
  }
  for (bool more = true; more;) {
    more = false;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      u32 left = value[i] >> RIGHT, right = value[i] & ((1u << RIGHT) - 1);
#pragma unroll
      for (int round = 0; round < 8; ++round) {
        const u32 width = round & 1 ? RIGHT : LEFT;  // of the half that is replaced: the halves swap every round
        u32 mixed = (right ^ words[round]) * 0x85EBCA6Bu;
        mixed ^= mixed >> 13;
        mixed *= 0xC2B2AE35u;
        mixed = (mixed ^ (mixed >> 16)) & ((1u << width) - 1);
        const u32 next = left ^ mixed;
        left = right, right = next;
      }
      if (walking[i]) value[i] = (left << RIGHT) | right;
      walking[i] = walking[i] && value[i] >= rows;
      more |= walking[i];
    }
  }
}

struct Draw {  // the state that dropout depends on
  u64 seed;
  u32 step, row;
  bool training;
  const u32* keep;  // threshold and scale of each dropout of a member
};

// Applies dropout to z and slope: N / 2 rows (`row`, `row + 8`, …) by two units, `unit + 2q` and the next, with q = lane % 4 and
// `unit` a multiple of eight. With N == 1, to a single element.
template <int N> INLINE void dropout(float (&z)[N], float (&slope)[N], const Draw& draw, u32 layer, u32 row, u32 unit, u32 threshold, float scale) {
  if (!draw.training) return;
  const u32 q = N == 1 ? unit / 2 & 3 : threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < (N + 1) / 2; ++half) {
    u32 c[4] = {unit / 8, row + half * 8, draw.step, layer};
    philox(c, draw.seed);
    u32 bits = pick(c, q);
    if (N == 1 && unit & 1) bits >>= 16;
#pragma unroll
    for (int e = 0; e < (N == 1 ? 1 : 2); ++e) {
      const float keep = (e ? bits >> 16 : bits & 0xffffu) < threshold ? scale : 0.f;
      z[half * 2 + e] *= keep;
      slope[half * 2 + e] *= keep;
    }
  }
}
