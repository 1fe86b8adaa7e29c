"""exp, log, tanh, erf and others on whole vectors, in plain arithmetic: no C library call, any target.

Each is within a few units in the last place of float32; the tests compare with float64 and state the bounds. NaN gives NaN.
Infinities give the limit, up to the smallest normal float.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Value

LOG2_E = 1.44269504088896341
# ln 2 as a sum: the first part has so few bits that its product with an exponent is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
SHIFTER, SHIFTER_BITS = 1.5 * 2**23, 0x4B400000  # a float whose last bit is worth 1, and its bits
# Polynomial of Cephes' expf: (exp(r) - 1 - r) / r**2 on [-ln2/2, ln2/2], highest power first.
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_MIN, EXP_MAX = -87.33654, 88.72283  # below, exp is no normal float; above, it is infinite
# Polynomial of Cephes' logf: (log(1 + r) - r + r**2 / 2) / r**3 on [sqrt(1/2) - 1, sqrt(2) - 1].
LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# Polynomial of Cephes' tanhf in x**2, for |x| below TANH_SMALL: (tanh(x) / x - 1) / x**2.
TANH_SMALL = 0.625
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# Rational approximation in x**2, as in Eigen: x * numerator / denominator.
ERF_MAX = 3.9
ERF_NUMERATOR = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
ERF_DENOMINATOR = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)  # fmt: skip


def polynomial(f: Function, x: Value, coefficients: Sequence[float], hint: str = "poly") -> Value:
    """Horner's rule, highest power first."""
    result = f.constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = f.fma(result, x, f.constant(coefficient), hint)
    return result


def _split_exponent(f: Function, x: Value) -> tuple[Value, Value]:
    """(n, r) with exp(x) = 2**n * exp(r) and |r| <= ln2 / 2; n is a whole number, as a float."""
    n = f.intrinsic(f.vector, f"rint.v{f.lanes}f32", f.fmul(x, f.constant(LOG2_E)), hint="exponent")
    r = f.fma(n, f.constant(-LN2_HIGH), x, "rest")
    return n, f.fma(n, f.constant(-LN2_LOW), r, "rest")


def _to_integers(f: Function, n: Value) -> Value:
    """A whole number below 2**22 as an integer; NaN gives any. Added to SHIFTER, it is in the low bits of the mantissa. LLVM
    converts lane by lane where NaN must give a defined result (`fptosi.sat`)."""
    shifted = f.fadd(n, f.constant(SHIFTER), "shifted")
    bits = f.op(f.integers, f"bitcast {f.vector} {shifted.text} to {f.integers}", "bits")
    return f.binary("sub", bits, f.integer(SHIFTER_BITS), "exponent")


def exp(f: Function, x: Value) -> Value:
    """exp(x); the power of two is applied in two factors, so that neither overflows alone."""
    n, r = _split_exponent(f, f.at_most(f.at_least(x, f.constant(EXP_MIN)), f.constant(EXP_MAX)))
    squared = f.fmul(r, r)
    result = f.fma(polynomial(f, r, EXP), squared, f.fadd(r, f.constant(1.0)), "exp")
    exponent = _to_integers(f, n)
    half = f.op(f.integers, f"ashr {f.integers} {exponent.text}, {f.integer(1).text}", "half")
    rest = f.op(f.integers, f"sub {f.integers} {exponent.text}, {half.text}", "rest")
    return f.fmul(f.fmul(result, _power_of_two(f, half)), _power_of_two(f, rest), "exp")


def exp_nonpositive(f: Function, x: Value) -> Value:
    """exp(x) for x <= 0 (a softmax, a sigmoid of -|x|): the power of two goes straight into the exponent's bits."""
    n, r = _split_exponent(f, f.at_least(x, f.constant(EXP_MIN + 0.5)))
    squared = f.fmul(r, r)
    result = f.fma(polynomial(f, r, EXP), squared, f.fadd(r, f.constant(1.0)), "exp")
    return f.fmul(result, _power_of_two(f, _to_integers(f, n)), "exp")


def expm1_nonpositive(f: Function, x: Value) -> Value:
    """exp(x) - 1 for x <= 0, with full relative accuracy near zero: 2**n * (exp(r) - 1) + (2**n - 1)."""
    n, r = _split_exponent(f, f.at_least(x, f.constant(EXP_MIN + 0.5)))
    remainder = f.fma(polynomial(f, r, EXP), f.fmul(r, r), r, "expm1")
    power = _power_of_two(f, _to_integers(f, n))
    return f.fma(power, remainder, f.fsub(power, f.constant(1.0)), "expm1")


def exp_minus_magnitude(f: Function, x: Value) -> Value:
    """exp(-|x|), exactly zero where the result is no normal float, so that an infinite x gives PyTorch's results."""
    magnitude = f.intrinsic(f.vector, f"fabs.v{f.lanes}f32", x, hint="magnitude")
    decay = exp_nonpositive(f, f.op(f.vector, f"fneg {f.vector} {magnitude.text}", "negated"))
    return f.select(f.compare("ult", magnitude, f.constant(-EXP_MIN - 0.5)), decay, f.zero, "decay")


def _power_of_two(f: Function, exponent: Value) -> Value:
    biased = f.op(f.integers, f"add {f.integers} {exponent.text}, {f.integer(127).text}", "biased")
    bits = f.op(f.integers, f"shl {f.integers} {biased.text}, {f.integer(23).text}", "bits")
    return f.op(f.vector, f"bitcast {f.integers} {bits.text} to {f.vector}", "power")


def log(f: Function, x: Value) -> Value:
    """The natural logarithm of a positive, normal x (a sum of exponentials); NaN stays NaN."""
    bits = f.op(f.integers, f"bitcast {f.vector} {x.text} to {f.integers}", "bits")
    # The mantissa is taken in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) moves the carry into the exponent.
    shifted = f.op(f.integers, f"sub {f.integers} {bits.text}, {f.integer(0x3F3504F3).text}", "shifted")
    exponent = f.op(f.integers, f"ashr {f.integers} {shifted.text}, {f.integer(23).text}", "exponent")
    high = f.op(f.integers, f"shl {f.integers} {exponent.text}, {f.integer(23).text}", "high")
    mantissa_bits = f.op(f.integers, f"sub {f.integers} {bits.text}, {high.text}", "mantissa")
    mantissa = f.op(f.vector, f"bitcast {f.integers} {mantissa_bits.text} to {f.vector}", "mantissa")
    n = f.op(f.vector, f"sitofp {f.integers} {exponent.text} to {f.vector}", "exponent")
    r = f.fsub(mantissa, f.constant(1.0), "rest")
    squared = f.fmul(r, r)
    result = f.fmul(f.fmul(polynomial(f, r, LOG), r), squared)
    result = f.fma(n, f.constant(LN2_LOW), result)
    result = f.fma(squared, f.constant(-0.5), result)
    result = f.fma(n, f.constant(LN2_HIGH), f.fadd(r, result), "log")
    special = f.compare("uno", x, x, "nan")
    return f.select(special, x, result, "log")


def log1p_unit(f: Function, x: Value) -> Value:
    """log(1 + x) for x in [0, 1]; the rounding error of 1 + x is added back."""
    u = f.fadd(x, f.constant(1.0))
    lost = f.fsub(x, f.fsub(u, f.constant(1.0)), "lost")
    return f.fadd(log(f, u), f.fdiv(lost, u), "log1p")


def _odd_rational(f: Function, x: Value, numerator: Sequence[float], denominator: Sequence[float]) -> Value:
    squared = f.fmul(x, x)
    return f.fdiv(f.fmul(x, polynomial(f, squared, numerator)), polynomial(f, squared, denominator))


def tanh(f: Function, x: Value) -> Value:
    """A polynomial near zero, 1 - 2 / (exp(2|x|) + 1) with x's sign elsewhere."""
    squared = f.fmul(x, x)
    near = f.fma(f.fmul(polynomial(f, squared, TANH), squared), x, x, "near")
    magnitude = f.intrinsic(f.vector, f"fabs.v{f.lanes}f32", x, hint="magnitude")
    decay = exp_nonpositive(f, f.fmul(magnitude, f.constant(-2.0)))
    far = f.fdiv(f.fsub(f.constant(1.0), decay), f.fadd(f.constant(1.0), decay), "far")
    far = f.intrinsic(f.vector, f"copysign.v{f.lanes}f32", far, x, hint="far")
    return f.select(f.compare("olt", magnitude, f.constant(TANH_SMALL)), near, far, "tanh")


def erf(f: Function, x: Value) -> Value:
    inside = f.at_most(f.at_least(x, f.constant(-ERF_MAX)), f.constant(ERF_MAX))
    result = _odd_rational(f, inside, ERF_NUMERATOR, ERF_DENOMINATOR)
    return f.at_most(f.at_least(result, f.constant(-1.0)), f.constant(1.0), "erf")


def sigmoid(f: Function, x: Value) -> Value:
    negated = f.op(f.vector, f"fneg {f.vector} {x.text}", "negated")
    return f.fdiv(f.constant(1.0), f.fadd(exp(f, negated), f.constant(1.0)), "sigmoid")


def sigmoid_from_decay(f: Function, x: Value, decay: Value) -> Value:
    """sigmoid(x), given decay = exp(-|x|): 1 / (1 + decay) for x >= 0, decay / (1 + decay) below."""
    numerator = f.select(f.compare("oge", x, f.zero), f.constant(1.0), decay)
    return f.fdiv(numerator, f.fadd(decay, f.constant(1.0)), "sigmoid")


def root(f: Function, x: Value) -> Value:
    """sqrt(x) for x >= 0: an estimate and one Newton step where the machine has estimates."""
    if not f.module.target.has_estimates:
        return f.intrinsic(f.vector, f"sqrt.v{f.lanes}f32", x, hint="root")
    # Zero and infinity have no finite reciprocal root; within these bounds there is one.
    inside = f.at_most(f.at_least(x, f.constant(1e-37)), f.constant(3e38))
    inverse = _estimate(f, "rsqrt14", inside)
    half = f.fmul(inside, f.constant(-0.5))
    correction = f.fma(f.fmul(half, inverse), inverse, f.constant(1.5))
    return f.fmul(f.fmul(inside, inverse), correction, "root")


def divide(f: Function, a: Value, b: Value) -> Value:
    """a / b for |b| between 1e-37 and 1e37, within two units in the last place."""
    if not f.module.target.has_estimates:
        return f.fdiv(a, b)
    inverse = _estimate(f, "rcp14", b)
    negated = f.op(f.vector, f"fneg {f.vector} {b.text}", "negated")
    inverse = f.fma(inverse, f.fma(negated, inverse, f.constant(1.0)), inverse, "inverse")
    return f.fmul(a, inverse, "quotient")


def _estimate(f: Function, name: str, x: Value) -> Value:
    return f.intrinsic(f.vector, f"x86.avx512.{name}.ps.512", x, f.zero, Value("i16", "-1"), hint="estimate")
