"""Device math that fits into any kernel: pure functions of values, no pointers.

Everything is computed in fp32. A tile that dropout acts on has a last axis of 8, the elements of one group. The elements of a
group share one Philox call and one byte of keep bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from triton import knobs

from onelaunch import activations

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter cannot run inline PTX
LANES = tl.constexpr(8)
# The last word of our Philox counters. PyTorch's kernels have small numbers there, so the two streams never coincide.
STREAM_TAG = tl.constexpr(0x6F6C0001)
LEAKY_SLOPE = tl.constexpr(activations.LEAKY_RELU_SLOPE)
SELU_SCALE = tl.constexpr(activations.SELU_SCALE)
SELU_SCALE_ALPHA = tl.constexpr(activations.SELU_SCALE * activations.SELU_ALPHA)
SOFTPLUS_THRESHOLD = tl.constexpr(activations.SOFTPLUS_THRESHOLD)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)
LOG2_E = tl.constexpr(1.4426950408889634)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(activations.GELU_CUBIC)
THREE_GELU_CUBIC = tl.constexpr(0.134145)
ERF_P = tl.constexpr(0.3275911)  # Abramowitz and Stegun 7.1.26


def _pair_asm(dtype: str) -> str:
    """PTX of `relu_and_drop` for two 16-bit elements in one register.

    Outputs: $0 is the pair y, $1 has each element's keep bit at the position of its sign. Inputs: $2 and $3 are z, $4 is a pair
    of 16-bit random numbers, $5 the addend without the two top bits, $6 those top bits, $7 the mask of both signs.

    After relu no sign bit is set, so adding 0x7FFF sets it in every element that is not zero. The carry out of 16 bits is the
    majority of both top bits and of the carry into them (lop3 0xE8). lop3 0x20 is a & ~b & c. prmt extends each sign to a mask.
    """
    return f"""{{ .reg .b32 s, d;
    cvt.rn.relu.{dtype}x2.f32 $0, $3, $2;
    add.u32 s, $0, 0x7FFF7FFF;
    and.b32 d, $4, 0x7FFF7FFF;
    add.u32 d, d, $5;
    lop3.b32 d, $4, $6, d, 0xE8;
    lop3.b32 $1, s, d, $7, 0x20;
    prmt.b32 d, $1, 0, 0xBB99;
    and.b32 $0, $0, d; }}"""


PAIR_BF16, PAIR_FP16 = tl.constexpr(_pair_asm("bf16")), tl.constexpr(_pair_asm("f16"))


@triton.jit
def load_key(key_ptr, seed, offset):
    """(seed, offset), given by value, or read from memory so that each replay of a CUDA graph draws a new mask."""
    if key_ptr is not None:
        seed = tl.load(key_ptr)
        offset = tl.load(key_ptr + 1)
    return seed.to(tl.int64), offset.to(tl.int64)


@triton.jit
def random_words(seed, offset, group):
    """Four independent uint32 per group, `[...]` int64 -> `[..., 2, 2]`: Philox with key seed and counter (group, offset)."""
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    offset_low = (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32) ^ STREAM_TAG
    key_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox_impl(low, high, offset_low + low * 0, offset_high + low * 0, key_low, key_high)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def random_16_bits(seed, offset, group):
    """Eight independent 16-bit integers per group, `[...]` int64 -> `[..., 8]` uint32.

    Lane 2i takes the low 16 bits of word i, lane 2i + 1 the high 16 bits.
    """
    words = random_words(seed, offset, group)
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, group.shape + (8,))  # noqa: RUF005 (Triton has no starred expressions)


@triton.jit
def kept(z, seed, offset, group, threshold):
    """Which elements of z, fp32 `[..., 8]`, dropout keeps, as booleans.

    The values of z do not matter. The assembly ties the random numbers to z so that the threads that hold its elements draw
    them. Without it, the threads that pack the bits would draw them a second time.
    """
    bits = random_16_bits(seed, offset, group).to(tl.int32)
    if not INTERPRETED:
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,f", [bits, z], dtype=tl.int32, is_pure=True, pack=1)
    return bits < threshold


@triton.jit
def relu_and_drop(z, seed, offset, group, threshold, DTYPE: tl.constexpr):
    """z, `[..., 8]` fp32 and already scaled -> (relu(z) where it is kept, else 0, in DTYPE; one byte of keep bits per group).

    16-bit types are processed two elements at a time: 5 integer instructions per element instead of 7. These instructions, not
    memory, limit a pass over bf16.
    """
    if INTERPRETED or tl.float32 == DTYPE:
        # Not `z > 0`: a NaN must pass through, and so must its gradient, as in PyTorch.
        keep = kept(z, seed, offset, group, threshold) & ((z <= 0) == 0)
        y = tl.where(keep, z, 0.0).to(DTYPE)
        bits = pack_bits(keep)
    else:
        even, odd = tl.split(tl.reshape(z, group.shape + (4, 2)))  # noqa: RUF005
        words = tl.reshape(random_words(seed, offset, group), group.shape + (4,))  # noqa: RUF005
        addend = 65536 - threshold  # an element is dropped if adding this to its 16 random bits carries
        low = (addend & 0x7FFF) * 0x10001
        top = (addend & 0x8000) * 0x10001
        # Both sign bits (0x80008000). 0 for a threshold of 0: the addend would be 65536, which does not fit 16 bits.
        signs = tl.where(threshold > 0, -0x7FFF8000, 0)
        pairs, keep = tl.inline_asm_elementwise(
            PAIR_BF16 if tl.bfloat16 == DTYPE else PAIR_FP16,
            "=&r,=&r,f,f,r,r,r,r",
            [even, odd, words, low, top, signs],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        y = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
        y = tl.reshape(y, z.shape).to(DTYPE, bitcast=True)
        lane = tl.arange(0, 4)
        for _ in tl.static_range(len(group.shape)):
            lane = lane[None]
        spread = tl.sum(keep >> (15 - 2 * lane).to(tl.uint32), axis=len(group.shape))  # bits 0, 2, 4, 6, 16, 18, 20, 22
        bits = (spread | (spread >> 15)).to(tl.uint8)
    return y, bits


@triton.jit
def scattered(number):
    """The same int64 numbers, hidden from the compiler's analysis of contiguity.

    Bytes at such addresses are loaded and stored by the threads that use them. For addresses known to be contiguous the
    compiler gives several bytes to one thread, and then every byte goes through shared memory, behind two barriers.
    """
    if not INTERPRETED:
        number = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [number], dtype=tl.int64, is_pure=True, pack=1)
    return number


@triton.jit
def pack_bits(keep):
    """`[..., 8]` booleans -> `[...]` bytes, lane 0 in the lowest bit."""
    lane = tl.arange(0, 8)
    for _ in tl.static_range(len(keep.shape) - 1):
        lane = lane[None]
    return tl.sum(keep.to(tl.int32) << lane, axis=len(keep.shape) - 1).to(tl.uint8)


@triton.jit
def unpack_bits(bits):
    """`[...]` bytes -> `[..., 8]` booleans, the inverse of `pack_bits`."""
    lane = tl.arange(0, 8)
    for _ in tl.static_range(len(bits.shape)):
        lane = lane[None]
    return ((tl.expand_dims(bits, -1).to(tl.int32) >> lane) & 1) != 0


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) to 1e-6 in five instructions.

    Triton's own spends a dozen instructions on the exact quotient, and a GEMM with it as epilogue gets slower: 8192 x 4096 x
    4096 bf16 on an H200 takes 366 us, against 349 us with relu.
    """
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
    """tanh(x) to 1e-6: 2 * sigmoid(2x) - 1 cancels near zero; the series is exact to fp32 there."""
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, series, 2 * sigmoid(2 * x) - 1)


@triton.jit
def normal_cdf(z):
    """(Φ(z), exp(-z²/2)), the first to 1e-7 by Abramowitz and Stegun 7.1.26, whose tail does not cancel.

    `activate` and `activation_gradient` use Triton's erf instead, which is more accurate and hides behind a GEMM's products.
    A pass over memory has time for about 30 instructions per element on an H200: with erf, gelu took 38 of them forward and 58
    backward, and PyTorch was faster; with this it takes 20 and 33.
    """
    magnitude = tl.abs(z) * (SQRT_HALF * ERF_P) + 1
    power = z * z * (-0.5 * LOG2_E)
    if INTERPRETED:
        t, bell = 1 / magnitude, tl.exp2(power)
    else:
        t = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [magnitude], tl.float32, True, 1)
        bell = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, True, 1)
    series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * series * bell
    return tl.where(z < 0, tail, 1 - tail), bell


@triton.jit
def expm1(x):
    """exp(x) - 1 to a relative error of 1e-6. The difference cancels near zero; the series is exact to fp32 there."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1)


@triton.jit
def softplus(z):
    """log(1 + exp(z)), and z above 20, as in PyTorch. 1 + e loses the digits of a small e; the series keeps them."""
    e = tl.exp(z)
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5)))))
    return tl.where(z > SOFTPLUS_THRESHOLD, z, tl.where(e < 0.05, series, tl.log(1 + e)))


@triton.jit
def mish_factors(z):
    """tanh(softplus(z)) and its derivative, from one exponential.

    With e = exp(z) and n = e * (e + 2) the first is n / (n + 2). Above 20 it is 1 to fp32, and n may overflow.
    """
    e = tl.exp(z)
    n = e * (e + 2)
    inverse = 1 / (n + 2)
    large = z > SOFTPLUS_THRESHOLD
    return tl.where(large, 1.0, n * inverse), tl.where(large, 0.0, 4 * e * inverse * ((e + 1) * inverse))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z); z itself where ACTIVATION is None."""
    if ACTIVATION == "relu":
        z = tl.where(z <= 0, 0.0, z)  # NaN stays NaN, as in PyTorch
    elif ACTIVATION == "leaky_relu":
        z = tl.where(z > 0, z, z * LEAKY_SLOPE)
    elif ACTIVATION == "sigmoid":
        z = sigmoid(z)
    elif ACTIVATION == "tanh":
        z = tanh(z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u): no cancellation, one exponential.
        z = z * sigmoid(z * TWO_SQRT_2_OVER_PI * (1 + z * z * GELU_CUBIC))
    elif ACTIVATION == "silu":
        z = z * sigmoid(z)
    elif ACTIVATION == "elu":
        z = tl.where(z > 0, z, expm1(z))
    elif ACTIVATION == "selu":
        z = tl.where(z > 0, z * SELU_SCALE, expm1(z) * SELU_SCALE_ALPHA)
    elif ACTIVATION == "mish":
        z = z * mish_factors(z)[0]
    elif ACTIVATION == "softplus":
        z = softplus(z)
    elif ACTIVATION == "hardswish":
        z = z * (tl.minimum(tl.maximum(z + 3, 0.0), 6.0) * (1 / 6))
    else:
        tl.static_assert(ACTIVATION is None, "unknown activation")
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
    elif ACTIVATION == "silu":
        s = sigmoid(z)
        slope = s * (1 + z * (1 - s))
    elif ACTIVATION == "elu":
        slope = tl.where(z > 0, 1.0, tl.exp(z))
    elif ACTIVATION == "selu":
        slope = tl.where(z > 0, SELU_SCALE, tl.exp(z) * SELU_SCALE_ALPHA)
    elif ACTIVATION == "mish":
        t, dt = mish_factors(z)
        slope = t + z * dt
    elif ACTIVATION == "softplus":
        slope = tl.where(z > SOFTPLUS_THRESHOLD, 1.0, sigmoid(z))
    else:
        tl.static_assert(ACTIVATION == "hardswish", "unknown activation")
        slope = tl.where(z <= -3, 0.0, tl.where(z >= 3, 1.0, z * (1 / 3) + 0.5))
    return slope


@triton.jit
def activation_gradient_from_output(a, ACTIVATION: tl.constexpr):
    """act'(z), from the value after the activation, for the activations whose output determines it."""
    if ACTIVATION == "relu":
        slope = tl.where(a <= 0, 0.0, 1.0)
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(a > 0, 1.0, LEAKY_SLOPE)
    elif ACTIVATION == "sigmoid":
        slope = a * (1 - a)
    elif ACTIVATION == "tanh":
        slope = 1 - a * a
    elif ACTIVATION == "elu":
        slope = tl.where(a > 0, 1.0, a + 1)
    else:
        tl.static_assert(ACTIVATION == "selu", "needs the value before the activation")
        slope = tl.where(a > 0, SELU_SCALE, a + SELU_SCALE_ALPHA)
    return slope
