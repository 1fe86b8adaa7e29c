// The epilogue: the activation of x · Wᵀ + b in fp32, on pairs of elements that leave as 16-bit numbers.
#pragma once
#include "activations.cuh"

INLINE u32 pack_relu(float low, float high) {
    u32 pair;
    if constexpr (IS_BF16) asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two elements, from fp32 or already rounded to 16 bits.
template <int KIND, bool ALONE>
INLINE u32 finish_pair(float low, float high) {
    if constexpr (KIND == RELU) return pack_relu(low, high);
    else return pack(Activation<KIND>::template value<ALONE>(low), Activation<KIND>::template value<ALONE>(high));
}
template <int KIND>
INLINE u32 finish_pair(u32 pair) { return finish_pair<KIND, false>(low_of(pair), high_of(pair)); }
