// Shared by all CUDA C++ of the package: words, pairs of 16-bit numbers (bf16 if IS_BF16, else fp16), shared addresses.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__

INLINE u32 pack(float low, float high) {
  u32 word;
  if constexpr (IS_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
INLINE float low_of(u32 word) {
  if constexpr (IS_BF16) return __uint_as_float(word << 16);
  float value;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(word));
  return value;
}
INLINE float high_of(u32 word) {
  if constexpr (IS_BF16) return __uint_as_float(word & 0xffff0000u);
  float value;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(word));
  return value;
}
INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
