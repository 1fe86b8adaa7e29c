"""Device math that fits into any kernel: pure functions of values, no pointers.

Everything is computed in fp32. Tiles that meet dropout have a last axis of 8, the elements of one group: a group shares one
Philox call and one byte of keep bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter knows no PTX
LANES = tl.constexpr(8)
# The last word of our Philox counters. PyTorch's kernels leave small numbers there, so the streams never meet.
STREAM_TAG = tl.constexpr(0x6F6C0001)
LEAKY_SLOPE = tl.constexpr(0.01)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
LOG2_E = tl.constexpr(1.4426950408889634)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.044715)
THREE_GELU_CUBIC = tl.constexpr(0.134145)


@triton.jit
def load_key(key_ptr, seed, offset):
    """The dropout key: two numbers given by value, or read from memory so that a replayed CUDA graph draws anew."""
    if key_ptr is not None:
        seed = tl.load(key_ptr)
        offset = tl.load(key_ptr + 1)
    return seed.to(tl.int64), offset.to(tl.int64)


@triton.jit
def random_16_bits(seed, offset, group):
    """Eight independent 16-bit integers for each group: `[...]` int64 -> `[..., 8]` uint32.

    Philox with key = seed and counter = (group, offset): lane 2i takes the low half of word i, lane 2i + 1 the high half.
    """
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ STREAM_TAG
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox_impl(low, high, offset_low + low * 0, offset_high + low * 0, key_low, key_high)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, group.shape + (8,))  # noqa: RUF005 (Triton knows no star)


@triton.jit
def pack_bits(keep):
    """`[..., 8]` booleans -> one byte each, lane 0 in the lowest bit."""
    lane = tl.arange(0, 8)
    for _ in tl.static_range(len(keep.shape) - 1):
        lane = lane[None]
    return tl.sum(keep.to(tl.int32) << lane, axis=len(keep.shape) - 1).to(tl.uint8)


@triton.jit
def unpack_bits(bits):
    """One byte each -> `[..., 8]` booleans."""
    lane = tl.arange(0, 8)
    for _ in tl.static_range(len(bits.shape)):
        lane = lane[None]
    return ((tl.expand_dims(bits, -1).to(tl.int32) >> lane) & 1) != 0


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in five instructions and to 1e-6; Triton's own spends a dozen on the exact quotient, which a GEMM
    that ends in it feels (8192 x 4096 x 4096 bf16 on an H200: 366 us against 349 with relu)."""
    if INTERPRETED:
        s = 1 / (1 + tl.exp(-x))
    else:
        s = tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x * -LOG2_E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return s


@triton.jit
def tanh(x):
    # 2 * sigmoid(2x) - 1 cancels near zero; the series is exact to fp32 there.
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, series, 2 * sigmoid(2 * x) - 1)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z)"""
    if ACTIVATION == "relu":
        z = tl.where(z <= 0, 0.0, z)  # NaN stays NaN, as in torch
    elif ACTIVATION == "leaky_relu":
        z = tl.where(z > 0, z, z * LEAKY_SLOPE)
    elif ACTIVATION == "sigmoid":
        z = sigmoid(z)
    elif ACTIVATION == "tanh":
        z = tanh(z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u): no cancellation, one exponential.
        z = z * sigmoid(z * TWO_SQRT_2_OVER_PI * (1 + z * z * GELU_CUBIC))
    elif ACTIVATION == "silu":
        z = z * sigmoid(z)
    return z


@triton.jit
def activation_gradient(z, ACTIVATION: tl.constexpr):
    """act'(z), from the value before the activation."""
    if ACTIVATION == "relu":
        slope = tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(z > 0, 1.0, LEAKY_SLOPE)
    elif ACTIVATION == "sigmoid":
        s = sigmoid(z)
        slope = s * (1 - s)
    elif ACTIVATION == "tanh":
        t = tanh(z)
        slope = 1 - t * t
    elif ACTIVATION == "gelu":
        slope = 0.5 * (1 + tl.erf(z * SQRT_HALF)) + z * INVERSE_SQRT_2PI * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(z * TWO_SQRT_2_OVER_PI * (1 + z * z * GELU_CUBIC))
        slope = s + z * s * (1 - s) * TWO_SQRT_2_OVER_PI * (1 + z * z * THREE_GELU_CUBIC)
    else:
        tl.static_assert(ACTIVATION == "silu")
        s = sigmoid(z)
        slope = s * (1 + z * (1 - s))
    return slope


@triton.jit
def activation_gradient_from_output(a, ACTIVATION: tl.constexpr):
    """act'(z), from the value after the activation; for the four activations that allow it."""
    if ACTIVATION == "relu":
        slope = tl.where(a <= 0, 0.0, 1.0)
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(a > 0, 1.0, LEAKY_SLOPE)
    elif ACTIVATION == "sigmoid":
        slope = a * (1 - a)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        slope = 1 - a * a
    return slope


@triton.jit
def scaled_distance(x, largest, EXACT: tl.constexpr):
    """(x - largest) * log2(e), for fp32 numbers x. Not `EXACT`: in one instruction, rounded as halves are anyway."""
    if EXACT:
        distance = (x - largest) * LOG2_E
    else:
        distance = x * LOG2_E - largest * LOG2_E
    return distance
