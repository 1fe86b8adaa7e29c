"""Activations and dropout as pure vector functions: value in, value and derivative out. No addresses here.

A *group* is a run of such operations with nothing between them. Its derivative is either read off the group's output
(relu, leaky_relu, sigmoid, tanh: free) or computed on the way forward and stored (everything else).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.rng import keep_scale, keep_threshold
from onelaunch.run.network import Activation, Dropout

Operation = Activation | Dropout
GELU_CUBE = 0.044715


def derivative_from_output(operations: Sequence[Operation]) -> bool:
    """Whether the derivative of the whole group follows from its output alone."""
    names = [operation.name if isinstance(operation, Activation) else "dropout" for operation in operations]
    if names in ([], ["relu"], ["relu", "dropout"], ["sigmoid"], ["tanh"]):
        return True
    # A negative or zero slope would hide the sign of the input.
    return names == ["leaky_relu"] and isinstance(operations[0], Activation) and operations[0].slope > 0


def is_cheap(operations: Sequence[Operation]) -> bool:
    """Worth doing on the accumulators of a tile; the rest runs over the panel just written, from the nearest cache."""
    return all(
        isinstance(operation, Activation) and operation.name in ("relu", "leaky_relu") for operation in operations
    )


def forward(f: Function, x: Value, operations: Sequence[Operation], bits: Sequence[Value] = ()) -> Value:
    """The group's output. `bits` are the 16 random bits of each lane, one vector a Dropout; none: evaluation."""
    draws = iter(bits)
    for operation in operations:
        if isinstance(operation, Activation):
            x = _activate(f, x, operation)
        elif bits:
            x = f.fmul(x, _kept(f, operation, next(draws)), "kept")
    return x


def forward_with_derivative(
    f: Function, x: Value, operations: Sequence[Operation], bits: Sequence[Value]
) -> tuple[Value, Value]:
    """(output, d output / d x)."""
    draws = iter(bits)
    derivative: Value | None = None
    for operation in operations:
        if isinstance(operation, Activation):
            x, factor = _activate_with_derivative(f, x, operation)
        else:
            factor = _kept(f, operation, next(draws))
            x = f.fmul(x, factor, "kept")
        derivative = factor if derivative is None else f.fmul(derivative, factor, "derivative")
    return x, derivative if derivative is not None else f.constant(1.0)


def backward_from_output(f: Function, gradient: Value, output: Value, operations: Sequence[Operation]) -> Value:
    """gradient * derivative, for groups with `derivative_from_output`."""
    if not operations:
        return gradient
    first = operations[0]
    assert isinstance(first, Activation)
    match first.name:
        case "relu":
            if len(operations) == 2:
                dropout = operations[1]
                assert isinstance(dropout, Dropout)
                gradient = f.fmul(gradient, f.constant(keep_scale(dropout.p)))
            # "ugt": PyTorch lets the gradient of a NaN through.
            return f.select(f.compare("ugt", output, f.zero, "passes"), gradient, f.zero)
        case "leaky_relu":
            weaker = f.fmul(gradient, f.constant(first.slope))
            return f.select(f.compare("ogt", output, f.zero, "passes"), gradient, weaker)
        case "sigmoid":
            return f.fmul(gradient, f.fmul(output, f.fsub(f.constant(1.0), output)))
        case "tanh":
            negated = f.op(f.vector, f"fneg {f.vector} {output.text}", "negated")
            return f.fmul(gradient, f.fma(negated, output, f.constant(1.0)))
    raise AssertionError(first.name)


def _kept(f: Function, dropout: Dropout, bits: Value) -> Value:
    """1 / (1 - p) where the unit is kept, else 0."""
    threshold = keep_threshold(dropout.p)
    if threshold == 65536:
        return f.constant(keep_scale(dropout.p))
    narrow = f"<{f.lanes} x i16>"
    limit = f.op(narrow, f"trunc {f.integers} {f.integer(threshold).text} to {narrow}", "limit")
    keep = f.compare("ult", bits, limit, "keep")
    return f.select(keep, f.constant(keep_scale(dropout.p)), f.zero, "scale")


def _activate(f: Function, x: Value, activation: Activation) -> Value:
    match activation.name:
        case "relu":
            return f.at_least(x, f.zero, "relu")
        case "leaky_relu":
            return f.select(f.compare("ogt", x, f.zero), x, f.fmul(x, f.constant(activation.slope)), "leaky")
        case "sigmoid":
            return vector_math.sigmoid(f, x)
        case "tanh":
            return vector_math.tanh(f, x)
        case "silu":
            return f.fmul(x, vector_math.sigmoid(f, x), "silu")
        case "gelu":
            return f.fmul(x, _normal_cdf(f, x), "gelu")
        case "gelu_tanh":
            return f.fmul(x, _gelu_gate(f, x), "gelu")
    raise AssertionError(activation.name)


def _activate_with_derivative(f: Function, x: Value, activation: Activation) -> tuple[Value, Value]:
    one = f.constant(1.0)
    match activation.name:
        case "relu":
            return _activate(f, x, activation), f.select(f.compare("ugt", x, f.zero), one, f.zero)
        case "leaky_relu":
            slope = f.constant(activation.slope)
            return _activate(f, x, activation), f.select(f.compare("ogt", x, f.zero), one, slope)
        case "sigmoid":
            y = vector_math.sigmoid(f, x)
            return y, f.fmul(y, f.fsub(one, y))
        case "tanh":
            y = vector_math.tanh(f, x)
            return y, f.fsub(one, f.fmul(y, y))
        case "silu":
            gate = vector_math.sigmoid(f, x)
            y = f.fmul(x, gate, "silu")
            return y, f.fma(y, f.fsub(one, gate), gate, "derivative")
        case "gelu":
            cdf = _normal_cdf(f, x)
            # exp of a large negative number, so that an infinite x gives 0 and not NaN.
            exponent = f.at_least(f.fmul(f.fmul(x, x), f.constant(-0.5)), f.constant(-80.0))
            density = f.fmul(vector_math.exp_nonpositive(f, exponent), f.constant(1 / math.sqrt(2 * math.pi)))
            return f.fmul(x, cdf, "gelu"), f.fma(x, density, cdf, "derivative")
        case "gelu_tanh":
            gate = _gelu_gate(f, x)
            # gate = (1 + tanh u) / 2, so its slope is 2 gate (1 - gate) u'.
            slope = f.fma(f.fmul(x, x), f.constant(3 * GELU_CUBE), one)
            slope = f.fmul(slope, f.constant(2 * math.sqrt(2 / math.pi)))
            bend = f.fmul(f.fmul(gate, f.fsub(one, gate)), slope)
            return f.fmul(x, gate, "gelu"), f.fma(x, bend, gate, "derivative")
    raise AssertionError(activation.name)


def _normal_cdf(f: Function, x: Value) -> Value:
    erf = vector_math.erf(f, f.fmul(x, f.constant(1 / math.sqrt(2))))
    return f.fma(erf, f.constant(0.5), f.constant(0.5), "cdf")


def _gelu_gate(f: Function, x: Value) -> Value:
    cubic = f.fma(f.fmul(x, x), f.constant(GELU_CUBE), f.constant(1.0))
    inner = f.fmul(f.fmul(x, cubic), f.constant(math.sqrt(2 / math.pi)))
    return f.fma(vector_math.tanh(f, inner), f.constant(0.5), f.constant(0.5), "gate")
