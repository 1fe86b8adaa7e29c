"""A small MLP, linear → activation → … → linear, as one op: one kernel forward, two backward.

The layers of a network such as 8-64-64-4 are so small that each of their kernels mostly waits: for its launch, and for the
first bytes from memory. Unfused, forward and backward take 15 kernels; a training step of 256 rows in fp32 takes 60.9 µs on
an H200, and 29.3 with this op's three. Level 2 puts it into graphs (`fuse/patterns/mlp.py`); the modules stay those of the
user.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.activations import activate, activation_gradient, activation_gradient_from_output, saves_input
from onelaunch.errors import OnelaunchError
from onelaunch.kernels.mlp_shape import Shape
from onelaunch.ops.arguments import (
    KERNEL_DTYPES,
    check_activation,
    check_beside,
    check_float,
    check_same_dtype,
    kernels,
)
from onelaunch.ops.call_context import autocast_dtype, differentiable_backward, inside_transform, is_traced
from onelaunch.ops.second_derivatives import Unsaved, differentiable_gradients
from onelaunch.ops.widen import widen

Layers = list[tuple[Tensor, Tensor | None]]  # weight `[outputs, inputs]` and bias `[outputs]` of each


def mlp_reference(x: Tensor, layers: Layers, activation: str) -> Tensor:
    """What the op computes; differentiable."""
    *hidden, last = layers
    for weight, bias in hidden:
        x = activate(F.linear(x, weight, bias), activation)
    return F.linear(x, *last)


def _layers_of(parameters: Sequence[Tensor]) -> Layers:
    """The inverse of `_parameters_of`."""
    pairs = zip(parameters[::2], parameters[1::2], strict=True)
    return [(weight, bias if bias.numel() or not weight.shape[0] else None) for weight, bias in pairs]


def _parameters_of(layers: Layers) -> list[Tensor]:
    """Weights and biases in turns, as a custom op takes them: a missing bias is empty."""
    return [*chain.from_iterable((w, w.new_empty(0) if bias is None else bias) for w, bias in layers)]


def _shape(weights: Sequence[Tensor], biased: Sequence[bool]) -> Shape:
    return Shape((weights[0].shape[1], *(weight.shape[0] for weight in weights)), tuple(biased))


def _runs_kernels(x: Tensor, weights: Sequence[Tensor]) -> bool:
    return x.dtype in KERNEL_DTYPES and min(x.numel(), *(weight.numel() for weight in weights)) > 0


def _forward_reference(x: Tensor, layers: Layers, activation: str) -> tuple[Tensor, Tensor]:
    saved = []
    *hidden, last = layers
    for weight, bias in hidden:
        z = F.linear(x, weight, bias)
        x = activate(z, activation)
        saved.append(z if saves_input(activation) else x)
    return F.linear(x, *last), torch.cat(saved, 1)


def _backward_reference(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], saved: Tensor, shape: Shape, activation: str, with_dx: bool
) -> tuple[Tensor, Tensor]:
    gradients = dy.new_zeros(shape.gradients[-1])
    kept = saved.split([weight.shape[0] for weight in weights[:-1]], 1)
    of_input = saves_input(activation)
    values = [x, *((activate(one, activation) if of_input else one) for one in kept)]
    dz = dy
    for index in reversed(range(len(weights))):
        dweight, dbias = (dz.t() @ values[index]).flatten(), dz.sum(0)
        first, second = shape.gradients[2 * index : 2 * index + 2]
        gradients[first : first + len(dweight)] = dweight
        if shape.biased[index]:
            gradients[second : second + len(dbias)] = dbias
        if index:
            slope = activation_gradient if of_input else activation_gradient_from_output
            dh = widen(dz @ weights[index])
            dz = (dh * slope(widen(kept[index - 1]), activation)).to(dy.dtype)
    return dz @ weights[0] if with_dx else dy.new_empty(0), gradients


@torch.library.custom_op("onelaunch::mlp", mutates_args=(), device_types="cpu")
def mlp_op(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    """y, and what the backward pass needs of all hidden layers, side by side."""
    return _forward_reference(x, _layers_of(parameters), activation)


@mlp_op.register_kernel("cuda")
def _(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    if not _runs_kernels(x, parameters[::2]):
        return _forward_reference(x, _layers_of(parameters), activation)
    x, layers = x.contiguous(), _layers_of([one.contiguous() for one in parameters])
    weights, biases = zip(*layers, strict=True)
    shape = _shape(weights, [bias is not None for bias in biases])
    y, saved = x.new_empty(len(x), shape.widths[-1]), x.new_empty(len(x), shape.hidden[-1])
    tf32 = torch.backends.cuda.matmul.allow_tf32
    kernels("mlp").mlp_forward(x, weights, biases, saved, y, shape, activation=activation, tf32=tf32)
    return y, saved


@mlp_op.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    weights = parameters[::2]
    hidden = sum(weight.shape[0] for weight in weights[:-1])
    return x.new_empty(x.shape[0], weights[-1].shape[0]), x.new_empty(x.shape[0], hidden)


@torch.library.custom_op("onelaunch::mlp_gradients", mutates_args=(), device_types="cpu")
def mlp_gradients_op(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], saved: Tensor, biased: Sequence[bool], activation: str,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx (empty unless asked for) and the gradients of all parameters in one vector."""
    return _backward_reference(dy, x, weights, saved, _shape(weights, biased), activation, with_dx)


@mlp_gradients_op.register_kernel("cuda")
def _(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], saved: Tensor, biased: Sequence[bool], activation: str,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = _shape(weights, biased)
    if not _runs_kernels(x, weights):
        return _backward_reference(dy, x, weights, saved, shape, activation, with_dx)
    x = x.contiguous()
    dx, gradients = torch.empty_like(x) if with_dx else None, x.new_empty(shape.gradients[-1])
    kernels("mlp").mlp_backward(
        dy.contiguous(), x, [weight.contiguous() for weight in weights], saved.contiguous(), dx, gradients, shape,
        activation=activation, tf32=torch.backends.cuda.matmul.allow_tf32,
    )  # fmt: skip
    return x.new_empty(0) if dx is None else dx, gradients


@mlp_gradients_op.register_fake
def _(
    dy: Tensor, x: Tensor, weights: Sequence[Tensor], saved: Tensor, biased: Sequence[bool], activation: str,
    with_dx: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if with_dx else 0), x.new_empty(_shape(weights, biased).gradients[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, parameters, ctx.activation = inputs
    (first, _), *others = layers = _layers_of(parameters)
    ctx.first_shape, ctx.biased = first.shape, [bias is not None for _, bias in layers]
    ctx.mark_non_differentiable(output[1])
    eager = not is_traced(x)
    with_x, with_first = eager or first.requires_grad, eager or x.requires_grad  # each is for the other's gradient
    biases = {f"biases[{index}]": bias for index, (_, bias) in enumerate(layers)}
    ctx.unsaved = Unsaved(
        "the op mlp", {"x": None if with_x else x, "weights[0]": None if with_first else first, **biases}
    )
    weights = first if with_first else None, *(weight for weight, _ in others)
    ctx.save_for_backward(x if with_x else None, *weights, output[1])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, first, *weights, saved = ctx.saved_tensors
    with_dx = ctx.needs_input_grad[0]
    if differentiable_backward(dy):
        other_x, other_first, *biases = ctx.unsaved.unchanged()
        weights.insert(0, other_first if first is None else first)
        parameters = [*chain.from_iterable(zip(weights, biases, strict=True))]

        def function(x: Tensor, *parameters: Tensor) -> Tensor:
            return mlp_reference(x, [*zip(parameters[::2], parameters[1::2], strict=True)], ctx.activation)

        dx, *gradients = differentiable_gradients(function, [other_x if x is None else x, *parameters], dy)
        return dx, gradients, None
    # Where there is no x, nobody wants the gradient that would be computed from it; so with the first weight.
    x = dy.new_empty(len(dy), ctx.first_shape[1]) if x is None else x
    weights.insert(0, dy.new_empty(ctx.first_shape) if first is None else first)
    dx, gradients = mlp_gradients_op(dy, x, weights, saved, ctx.biased, ctx.activation, with_dx)
    shape = _shape(weights, ctx.biased)
    flat = [gradients[at : at + size] for at, size in zip(shape.gradients, shape.sizes, strict=False)]
    flat[::2] = [part.view(weight.shape) for part, weight in zip(flat[::2], weights, strict=True)]
    return dx if with_dx else None, flat, None


mlp_op.register_autograd(_backward, setup_context=_setup)


def _check(x: Tensor, layers: Layers) -> None:
    check_float("x", x)
    for index, (weight, bias) in enumerate(layers):
        for name, tensor in ((f"weights[{index}]", weight), (f"biases[{index}]", bias)):
            check_beside(name, tensor, "x", x)
            check_same_dtype(name, tensor, x)
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            shape = None if bias is None else tuple(bias.shape)
            raise OnelaunchError(
                f"weights[{index}] has shape {tuple(weight.shape)} and its bias {shape}: pass [outputs, inputs] and [outputs]"
            )
    widths = [x.shape[-1] if x.dim() else 0, *(weight.shape[0] for weight, _ in layers)]
    for index, (inputs, (weight, _)) in enumerate(zip(widths, layers, strict=False)):
        if weight.shape[1] != inputs:
            raise OnelaunchError(
                f"weights[{index}] has shape {tuple(weight.shape)}, but its input has {inputs} columns"
            )


def mlp(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str) -> Tensor:
    """Linear layers with an activation between each two of them, `[..., outputs of the last]`.

    x: `[..., inputs]`; weights: `[outputs, inputs]` of each of two or more layers; biases: `[outputs]` or None of each;
    activation: a name such as "relu". Raises OnelaunchError for shapes, types and devices that do not fit.
    """
    check_activation(activation)
    if len(weights) < 2 or len(biases) != len(weights):
        raise OnelaunchError(f"{len(weights)} weights and {len(biases)} biases: pass as many, of two or more layers")
    layers: Layers = [*zip(weights, biases, strict=True)]
    dtype = autocast_dtype(x.device) if x.dtype != torch.float64 else None
    if dtype is not None:
        x, layers = x.to(dtype), [(w.to(dtype), None if bias is None else bias.to(dtype)) for w, bias in layers]
    if inside_transform():
        return mlp_reference(x, layers, activation)
    _check(x, layers)
    y = mlp_op(x.unsqueeze(0).flatten(0, -2), _parameters_of(layers), activation)[0]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])
