// Fragments and the instructions that everything else is made of. No header of CUDA is included: NVRTC needs none.
//
// With g = lane / 4 and q = lane % 4, a lane holds of the operands of `mma.m16n8k16`
//   accumulator 16 x 8:   (row g, columns 2q, 2q+1), (row g+8, columns 2q, 2q+1)
//   left operand 16 x 16: four words, pairs along k: (row g, k 2q..), (row g+8, k 2q..), (row g, k 8+2q..), (row g+8, k 8+2q..)
//   right operand 16 x 8: two words, pairs along k: (k 2q.., column g), (k 8+2q.., column g)
// In shared memory a matrix is stored in blocks of 8 rows of 16 bytes (eight numbers). `ldmatrix` reads such a block as it is or
// transposed, without a bank conflict. In global memory operands are stored lane by lane. A float is the sum of PLANES 16-bit
// numbers (bf16: 8, 16 or 24 bits).
#pragma once
#include "words.cuh"

#define BULK (__CUDA_ARCH__ >= 900)  // bulk copies of whole rows, and barriers that count bytes

// A pair of floats as PLANES words: each plane holds the remainder that the planes before it leave.
INLINE void split(float low, float high, u32 (&planes)[PLANES]) {
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane) {
    planes[plane] = pack(low, high);
    if (plane + 1 < PLANES) {
      low -= low_of(planes[plane]);
      high -= high_of(planes[plane]);
    }
  }
}
INLINE u32 transposed(u32 word) {
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}
INLINE void multiply_add(float (&sum)[4], const u32 (&left)[4], u32 right0, u32 right1) {
  if constexpr (IS_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
INLINE void load_matrices(u32 address, u32 (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
}
INLINE void load_matrices(u32 address, u32 (&w)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
}
INLINE void load_transposed(u32 address, u32 (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
}
INLINE void load_transposed(u32 address, u32 (&w)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address));
}
// The lane whose address makes `load_transposed` give a left operand whose k are the stored rows: the second and third of its four
// matrices change places.
INLINE u32 transposed_lane(u32 lane) { return (lane & 7) | (lane & 8) << 1 | (lane & 16) >> 1; }
// The words of the four lanes of a quad, in lane order: eight numbers of one row.
INLINE void gather_quad(u32 word, u32 (&row)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) row[i] = __shfl_sync(~0u, word, i, 4);
}
// Word i of lane j becomes word j of lane i, within each quad.
INLINE void transpose_quad(u32 (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = other;
  }
}
INLINE u32 pick(const u32 (&w)[4], u32 i) { return i & 2 ? (i & 1 ? w[3] : w[2]) : (i & 1 ? w[1] : w[0]); }
INLINE void clear(float (&tile)[4]) { tile[0] = tile[1] = tile[2] = tile[3] = 0.f; }

// Shared memory by 32-bit address.
INLINE void load_shared(u32 address, u32 (&w)[4]) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
}
INLINE void load_shared(u32 address, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address));
}
INLINE void load_shared(u32 address, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address));
}
INLINE void store_shared(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
INLINE u32 load_word(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
INLINE float load_float(u32 address) { return __uint_as_float(load_word(address)); }
INLINE void store_shared(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
INLINE void store_shared(u32 address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
INLINE void store_word(u32 address, u32 word) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory"); }
INLINE void store_float(u32 address, float value) { store_word(address, __float_as_uint(value)); }

// Global memory that other blocks write while this one runs: through L2 only.
INLINE void load_global(const u32* pointer, u32 (&w)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(pointer) : "memory");
}
INLINE void store_global(u32* pointer, u32 a, u32 b) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1,%2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}
INLINE void store_global(u32* pointer, u32 a) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(pointer), "r"(a) : "memory");
}
INLINE u32 load_acquire(const u32* pointer) {
  u32 word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(pointer) : "memory");
  return word;
}
INLINE void store_release(u32* pointer, u32 word) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(word) : "memory");
}
INLINE void copy_16_bytes(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
INLINE void copy_4_bytes(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory"); }
INLINE void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
INLINE void copies_done() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#if BULK
INLINE void make_barrier(u32 barrier, u32 arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"); }
INLINE void end_barrier(u32 barrier) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory"); }
INLINE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE bool arrived(u32 barrier, u32 phase) {
  u32 yes;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(yes) : "r"(barrier), "r"(phase) : "memory");
  return yes;
}
// To this block, or to the same address in every block of the cluster; the barrier of each receiver counts the bytes.
INLINE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if constexpr (MULTICASTS_ROWS) asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((unsigned short)((1u << BLOCKS % 32) - 1)) : "memory");
  else asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif

INLINE u32 block_number() {  // read once and kept: reading it takes tens of clocks
  u32 number;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
  return number;
}
INLINE u32 rank_of_block() {  // in its cluster, or in the grid of a single run
#if MEMBERS
  if constexpr (BLOCKS == 1) return 0;
#if __CUDA_ARCH__ >= 900
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
#endif
  return block_number();
}
INLINE u64 clock_now() {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
  return now;
}
INLINE float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
INLINE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
// Sum over the eight lanes with the same q: over the rows of an accumulator tile.
INLINE float column_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 4);
  v += __shfl_xor_sync(~0u, v, 8);
  return v + __shfl_xor_sync(~0u, v, 16);
}
