"""Device math that fits into any kernel: pure functions of values, no pointers.

Everything is computed in fp32. Tiles that meet dropout have a last axis of 8, the elements of one group: a group shares one
Philox call and one byte of keep bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from triton import knobs

from onelaunch import activations

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter knows no PTX
LANES = tl.constexpr(8)
# The last word of our Philox counters. PyTorch's kernels leave small numbers there, so the streams never meet.
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


def _pair_asm(half: str) -> str:
    """PTX of `relu_and_drop` for two elements: $0 takes both halves of y, $1 the keep bits, in the place of their signs.
    $2 and $3 are z; $4 the random halves; $5 and $6 what to add to them, without its highest bits and those; $7 the signs.

    After relu no half has its sign set, so adding 0x7FFF sets it in all but zeros. The carry out of 16 bits is the majority
    of both highest bits and of the carry into them (lop3 0xE8). 0x20 is a & ~b & c; prmt makes a mask of each sign.
    """
    return f"""{{ .reg .b32 s, d;
    cvt.rn.relu.{half}x2.f32 $0, $3, $2;
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
    """The dropout key: two numbers given by value, or read from memory so that a replayed CUDA graph draws anew."""
    if key_ptr is not None:
        seed = tl.load(key_ptr)
        offset = tl.load(key_ptr + 1)
    return seed.to(tl.int64), offset.to(tl.int64)


@triton.jit
def random_words(seed, offset, group):
    """Four independent uint32 for each group, `[...]` int64 -> `[..., 2, 2]`: Philox with key = seed and counter = (group,
    offset)."""
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
    """Eight independent 16-bit integers for each group, `[...]` int64 -> `[..., 8]` uint32: lane 2i takes the low half of word
    i, lane 2i + 1 the high half."""
    words = random_words(seed, offset, group)
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, group.shape + (8,))  # noqa: RUF005 (Triton knows no star)


@triton.jit
def kept(z, seed, offset, group, threshold):
    """Which elements of z, fp32 `[..., 8]`, dropout keeps.

    z has no say in it. But tied to it, the numbers are drawn by the threads that hold its elements; left alone they are drawn
    by these and again by those that pack the bits.
    """
    bits = random_16_bits(seed, offset, group).to(tl.int32)
    if not INTERPRETED:
        bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,f", [bits, z], dtype=tl.int32, is_pure=True, pack=1)
    return bits < threshold


@triton.jit
def relu_and_drop(z, seed, offset, group, threshold, DTYPE: tl.constexpr):
    """`[..., 8]` fp32, scaled already -> relu(z) where it is kept, in DTYPE, and a byte of keep bits for each group.

    Halves are worked on two at a time, which takes 5 integer instructions an element where one at a time takes 7: what bounds
    a pass over bf16 is these, not memory.
    """
    if INTERPRETED or tl.float32 == DTYPE:
        # Not `z > 0`: a NaN must come through, and its gradient too, as in torch.
        keep = kept(z, seed, offset, group, threshold) & ((z <= 0) == 0)
        y = tl.where(keep, z, 0.0).to(DTYPE)
        bits = pack_bits(keep)
    else:
        even, odd = tl.split(tl.reshape(z, group.shape + (4, 2)))  # noqa: RUF005
        words = tl.reshape(random_words(seed, offset, group), group.shape + (4,))  # noqa: RUF005
        least = 65536 - threshold  # dropped is what carries when this is added to 16 random bits
        low = (least & 0x7FFF) * 0x10001
        top = (least & 0x8000) * 0x10001
        signs = tl.where(threshold > 0, -0x7FFF8000, 0)  # 0x80008000; of 65536, which drops all, 16 bits say nothing
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
    """The same int64 numbers, of which the compiler cannot see that they follow each other.

    Bytes at such addresses are loaded and stored by the threads that use them. Of neighbours it gives a thread several, and
    then every byte goes through shared memory, behind two barriers.
    """
    if not INTERPRETED:
        number = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [number], dtype=tl.int64, is_pure=True, pack=1)
    return number


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
