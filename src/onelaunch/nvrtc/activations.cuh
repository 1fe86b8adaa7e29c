// The activations, one specialisation of Activation each, for the resident kernel and the epilogue of the Hopper GEMM.
//
//   differentiate(z, slope)  replaces z by act(z) and multiplies `slope` by act'(z): fp32, to a few units in the last place
//   value<ALONE>(z)          act(z) for a result that is rounded to 16 bits, in few instructions
//
// nvrtc/activations.py generates the names (RELU, …) and the constants (SELU_SCALE, …) from the table in onelaunch/activations.py.
// NaN and infinities give what PyTorch gives.
#pragma once
#include "words.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f, SQRT_HALF = 0.7071067811865476f;

INLINE float reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
INLINE float exp2_of(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
INLINE float log2_of(float x) {
  asm("lg2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
INLINE float sigmoid_of(float z) { return 1.f / (1.f + expf(-z)); }

// The normal distribution function, to 5e-7 (Abramowitz and Stegun, 7.1.26). It takes half the instructions of `erff` and is
// more accurate below -4, where 1 + erf cancels.
INLINE float normal_cdf(float z) {
  const float t = reciprocal(fmaf(fabsf(z), 0.3275911f * SQRT_HALF, 1.0f));
  const float density = exp2_of(z * z * (-0.5f * LOG2_E));
  float tail = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
  tail = fmaf(t, tail, 0.5f * 1.421413741f);
  tail = fmaf(t, tail, 0.5f * -0.284496736f);
  tail = fmaf(t, tail, 0.5f * 0.254829592f) * t * density;
  return z > 0 ? 1 - tail : tail;
}
// a / (1 + 2^x). Beside matrix products it takes the fewest instructions, to 1e-6. ALONE, the special functions (four lanes per
// cycle) limit the speed, so it uses one of them instead of two, to 6e-5: 1 / (1 + e) is a polynomial for e from 0 to 1, and
// where 2^x is above one, the quotient follows from the reciprocal: e / (1 + e).
template <bool ALONE> INLINE float over_one_plus_exp2(float a, float x) {
  if constexpr (!ALONE) return a * reciprocal(exp2_of(x) + 1.0f);
  const float e = exp2_of(-fabsf(x));
  float sum = fmaf(e, -0.10911187f, 0.43077515f);
  sum = fmaf(e, sum, -0.78353897f);
  sum = fmaf(e, sum, 0.95915429f);
  sum = fmaf(e, sum, -0.99730813f);
  a *= fmaf(e, sum, 1.0f);
  return x > 0 ? a * e : a;
}
// e^z - 1 for z <= 0. The difference cancels near zero, where four terms of the series are exact to 1e-6.
INLINE float expm1_below_zero(float z) {
  const float series = z * fmaf(z, fmaf(z, fmaf(z, 1 / 24.0f, 1 / 6.0f), 0.5f), 1.0f);
  return z > -0.1f ? series : exp2_of(z * LOG2_E) - 1;
}

template <int KIND> struct Activation {
  static_assert(KIND < 0, "activations.cuh has no specialisation for this activation");
};
template <> struct Activation<NONE> {
  template <bool ALONE> INLINE static float value(float z) { return z; }
};
template <> struct Activation<RELU> {
  INLINE static void differentiate(float& z, float& slope) {
    slope = z > 0.f ? slope : 0.f;
    z = z < 0.f ? 0.f : z;  // keeps a NaN
  }  // no `value`: the epilogue rounds and clamps in one instruction
};
template <> struct Activation<LEAKY_RELU> {
  INLINE static void differentiate(float& z, float& slope, float slope_below_zero) {
    const float factor = z > 0.f ? 1.f : slope_below_zero;
    slope *= factor;
    z *= factor;
  }
  template <bool ALONE> INLINE static float value(float z) { return z > 0 ? z : z * LEAKY_RELU_SLOPE; }
};
template <> struct Activation<SIGMOID> {
  INLINE static void differentiate(float& z, float& slope) {
    z = sigmoid_of(z);
    slope *= z * (1.f - z);
  }
  template <bool ALONE> INLINE static float value(float z) { return over_one_plus_exp2<ALONE>(1, z * -LOG2_E); }
};
template <> struct Activation<TANH> {
  INLINE static void differentiate(float& z, float& slope) {
    z = tanhf(z);
    slope *= 1.f - z * z;
  }
  // 2 sigmoid(2 z) - 1 cancels near zero, where the series is exact to 16 bits.
  template <bool ALONE> INLINE static float value(float z) {
    const float square = z * z;
    const float series = z * fmaf(square, fmaf(square, 2 / 15.0f, -1 / 3.0f), 1.0f);
    return square < 0.01f ? series : over_one_plus_exp2<false>(2, z * (-2 * LOG2_E)) - 1;
  }
};
template <> struct Activation<GELU> {
  INLINE static void differentiate(float& z, float& slope) {
    const float below = 0.5f * (1.f + erff(z * SQRT_HALF)), density = 0.39894228040143268f * expf(-0.5f * z * z);
    slope *= fmaf(z, density, below);
    z *= below;
  }
  template <bool ALONE> INLINE static float value(float z) { return z * normal_cdf(z); }
};
template <> struct Activation<GELU_TANH> {
  INLINE static void differentiate(float& z, float& slope) {
    const float cube = GELU_CUBIC * z * z, inner = 0.79788456080286536f * fmaf(cube, z, z), t = tanhf(inner);
    const float inner_slope = 0.79788456080286536f * fmaf(3.f, cube, 1.f);
    slope *= 0.5f * (1.f + t) + 0.5f * z * (1.f - t * t) * inner_slope;
    z *= 0.5f * (1.f + t);
  }
  template <bool ALONE> INLINE static float value(float z) {  // 0.5 (1 + tanh u) is sigmoid(2 u)
    constexpr float SCALE = -LOG2_E * 1.5957691216057308f;
    return over_one_plus_exp2<ALONE>(z, z * fmaf(z * z, SCALE * GELU_CUBIC, SCALE));
  }
};
template <> struct Activation<SILU> {
  INLINE static void differentiate(float& z, float& slope) {
    const float s = sigmoid_of(z);
    slope *= s * fmaf(z, 1.f - s, 1.f);
    z *= s;
  }
  template <bool ALONE> INLINE static float value(float z) { return over_one_plus_exp2<ALONE>(z, z * -LOG2_E); }
};
template <> struct Activation<ELU> {
  INLINE static void differentiate(float& z, float& slope) {
    const float below = expm1f(z);
    slope *= z > 0.f ? 1.f : below + 1.f;
    z = z > 0.f ? z : below;
  }
  template <bool ALONE> INLINE static float value(float z) { return z > 0 ? z : expm1_below_zero(z); }
};
template <> struct Activation<SELU> {
  INLINE static void differentiate(float& z, float& slope) {
    const float below = expm1f(z);
    slope *= z > 0.f ? SELU_SCALE : fmaf(SELU_SCALE * SELU_ALPHA, below, SELU_SCALE * SELU_ALPHA);
    z = z > 0.f ? SELU_SCALE * z : SELU_SCALE * SELU_ALPHA * below;
  }
  template <bool ALONE> INLINE static float value(float z) {
    return z > 0 ? SELU_SCALE * z : SELU_SCALE * SELU_ALPHA * expm1_below_zero(z);
  }
};
// tanh(log(1 + e)) = n / (n + 2) with e = exp(z) and n = e (e + 2): no digits cancel. From z = 20 on the quotient is 1 in fp32, and
// the bound keeps e and its powers finite.
template <> struct Activation<MISH> {
  INLINE static void differentiate(float& z, float& slope) {
    const float bounded = fminf(z, 20.f), e = expf(bounded), n = e * (e + 2.f), inverse = 1.f / (n + 2.f), t = n * inverse;
    slope *= fmaf(bounded, 4.f * (e * inverse) * ((1.f + e) * inverse), t);
    z *= t;
  }
  template <bool ALONE> INLINE static float value(float z) {
    const float e = exp2_of(fminf(z, 20.f) * LOG2_E), n = e * (e + 2);
    return z * (n * reciprocal(n + 2));
  }
};
template <> struct Activation<SOFTPLUS> {
  INLINE static void differentiate(float& z, float& slope) {
    slope *= z > SOFTPLUS_THRESHOLD ? 1.f : sigmoid_of(z);
    z = z > SOFTPLUS_THRESHOLD ? z : log1pf(expf(z));
  }
  // 1 + e loses the digits of a small e; the series is exact to 1e-7 there.
  template <bool ALONE> INLINE static float value(float z) {
    const float e = exp2_of(z * LOG2_E);
    const float series = e * fmaf(e, fmaf(e, fmaf(e, -0.25f, 1 / 3.0f), -0.5f), 1.0f);
    return z > SOFTPLUS_THRESHOLD ? z : e < 0.02f ? series : log2_of(1 + e) * LN_2;
  }
};
template <> struct Activation<HARDSWISH> {
  INLINE static void differentiate(float& z, float& slope) {
    slope *= z <= -3.f ? 0.f : z >= 3.f ? 1.f : fmaf(z, 1 / 3.f, 0.5f);
    z = value<false>(z);
  }
  template <bool ALONE> INLINE static float value(float z) { return z * (1 / 6.f) * fminf(fmaxf(z + 3.f, 0.f), 6.f); }
};

// Part of an accumulator tile and the slopes that belong to it.
template <int KIND, int N, class... Parameters> INLINE void differentiate(float (&z)[N], float (&slope)[N], Parameters... parameters) {
#pragma unroll
  for (int e = 0; e < N; ++e) Activation<KIND>::differentiate(z[e], slope[e], parameters...);
}
