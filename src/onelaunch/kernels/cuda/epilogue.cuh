// What happens to an element of x · Wᵀ + b on its way out: the activation, in fp32, on pairs of halves.
#pragma once
#include "words.cuh"

constexpr float LOG2_E = 1.4426950408889634f, SQRT_HALF = 0.7071067811865476f;

enum Activation { NONE, RELU, LEAKY_RELU, SIGMOID, TANH, GELU, GELU_TANH, SILU };

INLINE u32 pack_relu(float low, float high) {
    u32 pair;
    if constexpr (HALF_IS_BF16) asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

INLINE float reciprocal(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
INLINE float exp2_of(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// The normal distribution's function, to 5e-7 (Abramowitz and Stegun, 7.1.26): half the instructions of `erff`, and better
// below -4, where that one's result is lost in 1 + erf.
INLINE float normal(float z) {
    const float t = reciprocal(fmaf(fabsf(z), 0.3275911f * SQRT_HALF, 1.0f));
    const float density = exp2_of(z * z * (-0.5f * LOG2_E));
    float tail = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    tail = fmaf(t, tail, 0.5f * 1.421413741f);
    tail = fmaf(t, tail, 0.5f * -0.284496736f);
    tail = fmaf(t, tail, 0.5f * 0.254829592f) * t * density;
    return z > 0 ? 1 - tail : tail;
}

// a / (1 + 2^x). Beside products, in the fewest instructions, to 1e-6. ALONE, where special functions (four lanes a cycle) are
// what takes the time, with one of them instead of two, to 6e-5: 1 / (1 + e) is a polynomial for e from 0 to 1, and where 2^x
// is more than one, the quotient is that of its reciprocal, e / (1 + e).
template <bool ALONE>
INLINE float over_one_plus_exp2(float a, float x) {
    if constexpr (!ALONE) return a * reciprocal(exp2_of(x) + 1.0f);
    const float e = exp2_of(-fabsf(x));
    float sum = fmaf(e, -0.10911187f, 0.43077515f);
    sum = fmaf(e, sum, -0.78353897f);
    sum = fmaf(e, sum, 0.95915429f);
    sum = fmaf(e, sum, -0.99730813f);
    a *= fmaf(e, sum, 1.0f);
    return x > 0 ? a * e : a;
}

template <int KIND, bool ALONE>
INLINE float activate(float z) {
    if constexpr (KIND == LEAKY_RELU) return z > 0 ? z : z * 0.01f;
    if constexpr (KIND == SIGMOID) return over_one_plus_exp2<ALONE>(1, z * -LOG2_E);
    if constexpr (KIND == TANH) {  // 2 sigmoid(2 z) - 1 cancels near zero; the series is exact to a half there
        const float square = z * z;
        const float series = z * fmaf(square, fmaf(square, 2 / 15.0f, -1 / 3.0f), 1.0f);
        return square < 0.01f ? series : over_one_plus_exp2<false>(2, z * (-2 * LOG2_E)) - 1;
    }
    if constexpr (KIND == GELU) return z * normal(z);
    if constexpr (KIND == GELU_TANH) {  // 0.5 (1 + tanh u) is sigmoid(2 u)
        constexpr float SCALE = -LOG2_E * 1.5957691216057308f;
        return over_one_plus_exp2<ALONE>(z, z * fmaf(z * z, SCALE * 0.044715f, SCALE));
    }
    if constexpr (KIND == SILU) return over_one_plus_exp2<ALONE>(z, z * -LOG2_E);
    return z;
}

// Two elements on their way out: from fp32, or rounded before.
template <int KIND, bool ALONE>
INLINE u32 finish_pair(float low, float high) {
    if constexpr (KIND == RELU) return pack_relu(low, high);
    return pack(activate<KIND, ALONE>(low), activate<KIND, ALONE>(high));
}
template <int KIND>
INLINE u32 finish_pair(u32 pair) { return finish_pair<KIND, false>(low_of(pair), high_of(pair)); }
