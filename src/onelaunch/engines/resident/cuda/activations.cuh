// Activations on part of an accumulator tile: each replaces z by its value and multiplies `slope` by its derivative.
#pragma once
#include "base.cuh"

#define EACH _Pragma("unroll") for (int e = 0; e < N; ++e)
#define ACTIVATION template <int N> INLINE void

INLINE float sigmoid_of(float z) { return 1.f / (1.f + expf(-z)); }

ACTIVATION relu(float (&z)[N], float (&slope)[N]) {
  EACH {
    slope[e] = z[e] > 0.f ? slope[e] : 0.f;
    z[e] = z[e] < 0.f ? 0.f : z[e];  // and a NaN stays one
  }
}
ACTIVATION leaky_relu(float (&z)[N], float (&slope)[N], float below) {
  EACH {
    const float factor = z[e] > 0.f ? 1.f : below;
    slope[e] *= factor;
    z[e] *= factor;
  }
}
ACTIVATION sigmoid(float (&z)[N], float (&slope)[N]) {
  EACH {
    z[e] = sigmoid_of(z[e]);
    slope[e] *= z[e] * (1.f - z[e]);
  }
}
ACTIVATION tanh_of(float (&z)[N], float (&slope)[N]) {
  EACH {
    z[e] = tanhf(z[e]);
    slope[e] *= 1.f - z[e] * z[e];
  }
}
ACTIVATION gelu(float (&z)[N], float (&slope)[N]) {
  EACH {
    const float below = 0.5f * (1.f + erff(z[e] * 0.70710678118654752f)), density = 0.39894228040143268f * expf(-0.5f * z[e] * z[e]);
    slope[e] *= fmaf(z[e], density, below);
    z[e] *= below;
  }
}
ACTIVATION gelu_tanh(float (&z)[N], float (&slope)[N]) {
  EACH {
    const float cube = 0.044715f * z[e] * z[e], inner = 0.79788456080286536f * fmaf(cube, z[e], z[e]), t = tanhf(inner);
    const float inner_slope = 0.79788456080286536f * fmaf(3.f, cube, 1.f);
    slope[e] *= 0.5f * (1.f + t) + 0.5f * z[e] * (1.f - t * t) * inner_slope;
    z[e] *= 0.5f * (1.f + t);
  }
}
ACTIVATION silu(float (&z)[N], float (&slope)[N]) {
  EACH {
    const float s = sigmoid_of(z[e]);
    slope[e] *= s * fmaf(z[e], 1.f - s, 1.f);
    z[e] *= s;
  }
}
#undef EACH
#undef ACTIVATION
