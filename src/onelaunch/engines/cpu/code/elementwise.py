"""Activations and dropout as pure vector functions: value in, value and derivative out. No addresses here.

A *group* is a sequence of such operations with nothing between them. Its derivative either follows from the group's output
(free), or is computed in the forward pass and stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onelaunch.activations import ACTIVATIONS, GELU_CUBIC, SELU_ALPHA, SELU_SCALE, SOFTPLUS_THRESHOLD
from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.rng import keep_scale, keep_threshold
from onelaunch.run.network import Activation, Dropout

Operation = Activation | Dropout


@dataclass(frozen=True)
class Group:
    """The names of a group's operations ("dropout" or an activation), which shape its code. Slopes and dropout rates do not:
    each operation has a field `parameter<n>`, and a Dropout also `limit<n>`."""

    names: tuple[str, ...]

    @staticmethod
    def of(operations: Sequence[Operation]) -> Group:
        return Group(tuple("dropout" if isinstance(op, Dropout) else op.name for op in operations))

    @property
    def fields(self) -> str:
        return ", ".join(f"float parameter{n}, i64 limit{n}" for n in range(len(self.names)))

    @property
    def dropouts(self) -> tuple[int, ...]:
        return tuple(n for n, name in enumerate(self.names) if name == "dropout")


def field_values(operations: Sequence[Operation]) -> dict[str, float | int]:
    """The values of `Group.fields`."""
    values: dict[str, float | int] = {}
    for n, op in enumerate(operations):
        values[f"parameter{n}"] = keep_scale(op.p) if isinstance(op, Dropout) else op.slope
        values[f"limit{n}"] = keep_threshold(op.p) if isinstance(op, Dropout) else 0
    return values


def derivative_from_output(operations: Sequence[Operation]) -> bool:
    """Whether the derivative of the whole group follows from its output alone."""
    match tuple(operations):
        case () | (Activation("relu"), Dropout()):
            return True
        case (Activation("leaky_relu", slope),):
            return slope > 0  # otherwise the output's sign is not the input's
        case (Activation(name),):
            return not ACTIVATIONS[name].saves_input
    return False


class Operations:
    """Emits the operations of a group inside one function, which has the group's fields."""

    def __init__(self, f: Function, group: Group) -> None:
        self.f, self.group = f, group
        self._parameters = [f.splat(f[f"parameter{n}"], "parameter") for n in range(len(group.names))]
        self._limits = {}
        for n in group.dropouts:
            limit = f.op("i32", f"trunc i64 {f[f'limit{n}'].text} to i32", "limit")
            self._limits[n] = f.splat(limit, "limit")

    def forward(self, x: Value, bits: Sequence[Value] = ()) -> Value:
        """The group's output. `bits` has 16 random bits per lane, one vector per Dropout; empty in evaluation."""
        draws = iter(bits)
        for n, name in enumerate(self.group.names):
            if name != "dropout":
                x, _ = _activate(self.f, x, name, self._parameters[n])
            elif bits:
                x = self.f.fmul(x, self._dropout_factor(n, next(draws)), "kept")
        return x

    def forward_with_derivative(self, x: Value, bits: Sequence[Value]) -> tuple[Value, Value]:
        """(output, d output / d x)."""
        f, draws = self.f, iter(bits)
        derivative: Value | None = None
        for n, name in enumerate(self.group.names):
            if name != "dropout":
                x, factor_of = _activate(f, x, name, self._parameters[n])
                factor = factor_of()
            else:
                factor = self._dropout_factor(n, next(draws))
                x = f.fmul(x, factor, "kept")
            derivative = factor if derivative is None else f.fmul(derivative, factor, "derivative")
        return x, derivative if derivative is not None else f.constant(1.0)

    def store_forward(self, x: Value, bits: Sequence[Value], position: Int, *, stores: bool) -> None:
        """Write the group's output to the field `output` and, if `stores`, the derivative to `derivative`."""
        f = self.f
        if stores:
            x, derivative = self.forward_with_derivative(x, bits)
            f.store(derivative, f["derivative"], position)
        else:
            x = self.forward(x, bits)
        f.store(x, f["output"], position)

    def _dropout_factor(self, n: int, bits: Value) -> Value:
        """1 / (1 - p) where the unit is kept, else 0."""
        f = self.f
        wide = f.op(f.integers, f"zext {bits.type} {bits.text} to {f.integers}", "bits")
        return f.select(f.compare("ult", wide, self._limits[n], "keep"), self._parameters[n], f.zero, "scale")

    def backward_from_output(self, gradient: Value, output: Value) -> Value:
        """gradient * derivative, for groups with `derivative_from_output`."""
        f = self.f
        match self.group.names:
            case ():
                return gradient
            case ("relu", *dropouts):
                for n, _ in enumerate(dropouts, 1):
                    gradient = f.fmul(gradient, self._parameters[n])
                # "ugt": PyTorch lets the gradient of a NaN through.
                return f.select(f.compare("ugt", output, f.zero, "passes"), gradient, f.zero)
            case ("leaky_relu",):
                weaker = f.fmul(gradient, self._parameters[0])
                return f.select(f.compare("ogt", output, f.zero, "passes"), gradient, weaker)
            case ("sigmoid",):
                return f.fmul(gradient, f.fmul(output, f.fsub(f.constant(1.0), output)))
            case ("tanh",):
                negated = f.op(f.vector, f"fneg {f.vector} {output.text}", "negated")
                return f.fmul(gradient, f.fma(negated, output, f.constant(1.0)))
            case ("elu",):
                return f.fmul(gradient, _elu_derivative(f, output, 1.0, 1.0))
            case ("selu",):
                return f.fmul(gradient, _elu_derivative(f, output, SELU_ALPHA, SELU_SCALE))
        raise AssertionError(self.group)


def _activate(f: Function, x: Value, name: str, slope: Value) -> tuple[Value, Callable[[], Value]]:
    """The value, and a function that emits the derivative with respect to `x`. `slope` is that of leaky_relu."""
    one = f.constant(1.0)
    match name:
        case "relu":
            return f.at_least(x, f.zero, "relu"), lambda: f.select(f.compare("ugt", x, f.zero), one, f.zero)
        case "leaky_relu":
            y = f.select(f.compare("ogt", x, f.zero), x, f.fmul(x, slope), "leaky")
            return y, lambda: f.select(f.compare("ogt", x, f.zero), one, slope)
        case "sigmoid":
            y = vector_math.sigmoid(f, x)
            return y, lambda: f.fmul(y, f.fsub(one, y))
        case "tanh":
            y = vector_math.tanh(f, x)
            return y, lambda: f.fsub(one, f.fmul(y, y))
        case "silu":
            gate = vector_math.sigmoid(f, x)
            y = f.fmul(x, gate, "silu")
            return y, lambda: f.fma(y, f.fsub(one, gate), gate, "derivative")
        case "gelu":
            erf = vector_math.erf(f, f.fmul(x, f.constant(1 / math.sqrt(2))))
            cdf = f.fma(erf, f.constant(0.5), f.constant(0.5), "cdf")
            return f.fmul(x, cdf, "gelu"), lambda: _gelu_derivative(f, x, cdf)
        case "gelu_tanh":
            cubic = f.fma(f.fmul(x, x), f.constant(GELU_CUBIC), one)
            inner = f.fmul(f.fmul(x, cubic), f.constant(math.sqrt(2 / math.pi)))
            gate = f.fma(vector_math.tanh(f, inner), f.constant(0.5), f.constant(0.5), "gate")
            return f.fmul(x, gate, "gelu"), lambda: _gelu_tanh_derivative(f, x, gate)
        case "elu":
            y = _elu(f, x, 1.0, 1.0)
            return y, lambda: _elu_derivative(f, y, 1.0, 1.0)
        case "selu":
            y = _elu(f, x, SELU_ALPHA, SELU_SCALE)
            return y, lambda: _elu_derivative(f, y, SELU_ALPHA, SELU_SCALE)
        case "mish":
            return _mish(f, x)
        case "softplus":
            decay = vector_math.exp_minus_magnitude(f, x)
            y = f.fadd(f.at_least(x, f.zero), vector_math.log1p_unit(f, decay))
            linear = f.compare("ogt", x, f.constant(SOFTPLUS_THRESHOLD), "linear")
            y = f.select(linear, x, y, "softplus")
            return y, lambda: f.select(linear, one, vector_math.sigmoid_from_decay(f, x, decay))
        case "hardswish":
            gate = f.at_most(f.at_least(f.fadd(x, f.constant(3.0)), f.zero), f.constant(6.0))
            return f.fmul(x, f.fmul(gate, f.constant(1 / 6)), "hardswish"), lambda: _hardswish_derivative(f, x)
    raise AssertionError(name)


def _gelu_derivative(f: Function, x: Value, cdf: Value) -> Value:
    # The exponent is clamped, so that an infinite x gives a density of 0 and not NaN.
    exponent = f.at_least(f.fmul(f.fmul(x, x), f.constant(-0.5)), f.constant(-80.0))
    density = f.fmul(vector_math.exp_nonpositive(f, exponent), f.constant(1 / math.sqrt(2 * math.pi)))
    return f.fma(x, density, cdf, "derivative")


def _gelu_tanh_derivative(f: Function, x: Value, gate: Value) -> Value:
    """gate = (1 + tanh u) / 2, so its derivative is 2 gate (1 - gate) u'."""
    one = f.constant(1.0)
    inner = f.fma(f.fmul(x, x), f.constant(3 * GELU_CUBIC), one)
    inner = f.fmul(inner, f.constant(2 * math.sqrt(2 / math.pi)))
    return f.fma(x, f.fmul(f.fmul(gate, f.fsub(one, gate)), inner), gate, "derivative")


def _elu(f: Function, x: Value, alpha: float, scale: float) -> Value:
    above, below = x, vector_math.expm1_nonpositive(f, x)
    if scale != 1 or alpha != 1:
        above, below = f.fmul(x, f.constant(scale)), f.fmul(below, f.constant(alpha * scale))
    return f.select(f.compare("ogt", x, f.zero), above, below, "elu")


def _elu_derivative(f: Function, output: Value, alpha: float, scale: float) -> Value:
    below = f.fadd(output, f.constant(alpha * scale))
    return f.select(f.compare("ogt", output, f.zero), f.constant(scale), below, "derivative")


def _mish(f: Function, x: Value) -> tuple[Value, Callable[[], Value]]:
    """x * t with t = tanh(softplus(x)) = ((1 + exp(x))**2 - 1) / ((1 + exp(x))**2 + 1).

    Above zero both are divided by exp(2x), so that only decay = exp(-|x|) occurs. 1 - t comes from the same denominator:
    subtracting t from 1 would lose its digits.
    """
    one, two = f.constant(1.0), f.constant(2.0)
    decay = vector_math.exp_minus_magnitude(f, x)
    above = f.compare("oge", x, f.zero)
    numerator = f.select(above, f.fma(two, decay, one), f.fmul(decay, f.fadd(decay, two)))  # of t
    rest = f.select(above, f.fmul(two, f.fmul(decay, decay)), two)  # the numerator of 1 - t
    inverse = f.fdiv(one, f.fadd(numerator, rest), "inverse")
    t = f.fmul(numerator, inverse, "gate")

    def derivative() -> Value:
        bend = f.fmul(f.fmul(rest, inverse), f.fadd(t, one))  # 1 - t**2
        slope = f.fmul(f.fmul(x, vector_math.sigmoid_from_decay(f, x, decay)), bend)
        return f.fadd(t, slope, "derivative")

    return f.fmul(x, t, "mish"), derivative


def _hardswish_derivative(f: Function, x: Value) -> Value:
    inside = f.fma(x, f.constant(1 / 3), f.constant(0.5))
    # At -3 and 3 as PyTorch: 0 and 1. A NaN stays NaN.
    inside = f.select(f.compare("oge", x, f.constant(3.0)), f.constant(1.0), inside)
    return f.select(f.compare("ole", x, f.constant(-3.0)), f.zero, inside, "derivative")
