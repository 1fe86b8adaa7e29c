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
from onelaunch.ops.arguments import KERNEL_DTYPES, check_activation, check_beside, check_float, kernels
from onelaunch.ops.call_context import autocast_dtype, differentiable_backward, inside_transform
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


def _shape_of(layers: Layers) -> Shape:
    widths = (layers[0][0].shape[1], *(weight.shape[0] for weight, _ in layers))
    return Shape(widths, tuple(bias is not None for _, bias in layers))


def _runs_kernels(x: Tensor, parameters: Sequence[Tensor]) -> bool:
    return x.dtype in KERNEL_DTYPES and min(x.numel(), *(weight.numel() for weight in parameters[::2])) > 0


def _forward_reference(x: Tensor, layers: Layers, activation: str) -> tuple[Tensor, Tensor]:
    saved = []
    *hidden, last = layers
    for weight, bias in hidden:
        z = F.linear(x, weight, bias)
        x = activate(z, activation)
        saved.append(z if saves_input(activation) else x)
    return F.linear(x, *last), torch.cat(saved, 1)


def _backward_reference(
    dy: Tensor, x: Tensor, layers: Layers, saved: Tensor, activation: str, with_dx: bool
) -> tuple[Tensor, Tensor]:
    shape = _shape_of(layers)
    gradients = dy.new_zeros(shape.gradients[-1])
    kept = saved.split([weight.shape[0] for weight, _ in layers[:-1]], 1)
    of_input = saves_input(activation)
    values = [x, *((activate(one, activation) if of_input else one) for one in kept)]
    dz = dy
    for index in reversed(range(len(layers))):
        dweight, dbias = (dz.t() @ values[index]).flatten(), dz.sum(0)
        first, second = shape.gradients[2 * index : 2 * index + 2]
        gradients[first : first + len(dweight)] = dweight
        if shape.biased[index]:
            gradients[second : second + len(dbias)] = dbias
        if index:
            slope = activation_gradient if of_input else activation_gradient_from_output
            dh = widen(dz @ layers[index][0])
            dz = (dh * slope(widen(kept[index - 1]), activation)).to(dy.dtype)
    return dz @ layers[0][0] if with_dx else dy.new_empty(0), gradients


@torch.library.custom_op("onelaunch::mlp", mutates_args=(), device_types="cpu")
def mlp_op(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    """y, and what the backward pass needs of all hidden layers, side by side."""
    return _forward_reference(x, _layers_of(parameters), activation)


@mlp_op.register_kernel("cuda")
def _(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    if not _runs_kernels(x, parameters):
        return _forward_reference(x, _layers_of(parameters), activation)
    x, layers = x.contiguous(), _layers_of([one.contiguous() for one in parameters])
    shape = _shape_of(layers)
    y, saved = x.new_empty(len(x), shape.widths[-1]), x.new_empty(len(x), shape.hidden[-1])
    kernels("mlp").mlp_forward(
        x,
        *zip(*layers, strict=True),
        saved,
        y,
        shape,
        activation=activation,
        tf32=torch.backends.cuda.matmul.allow_tf32,
    )
    return y, saved


@mlp_op.register_fake
def _(x: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    weights = parameters[::2]
    hidden = sum(weight.shape[0] for weight in weights[:-1])
    return x.new_empty(x.shape[0], weights[-1].shape[0]), x.new_empty(x.shape[0], hidden)


@torch.library.custom_op("onelaunch::mlp_gradients", mutates_args=(), device_types="cpu")
def mlp_gradients_op(
    dy: Tensor, x: Tensor, parameters: Sequence[Tensor], saved: Tensor, activation: str, with_dx: bool
) -> tuple[Tensor, Tensor]:
    """dx (empty unless asked for) and the gradients of all parameters in one vector."""
    return _backward_reference(dy, x, _layers_of(parameters), saved, activation, with_dx)


@mlp_gradients_op.register_kernel("cuda")
def _(
    dy: Tensor, x: Tensor, parameters: Sequence[Tensor], saved: Tensor, activation: str, with_dx: bool
) -> tuple[Tensor, Tensor]:
    if not _runs_kernels(x, parameters):
        return _backward_reference(dy, x, _layers_of(parameters), saved, activation, with_dx)
    x, layers = x.contiguous(), _layers_of([one.contiguous() for one in parameters])
    shape = _shape_of(layers)
    dx, gradients = torch.empty_like(x) if with_dx else None, x.new_empty(shape.gradients[-1])
    kernels("mlp").mlp_backward(
        dy.contiguous(), x, [weight for weight, _ in layers], saved.contiguous(), dx, gradients, shape,
        activation=activation, tf32=torch.backends.cuda.matmul.allow_tf32,
    )  # fmt: skip
    return x.new_empty(0) if dx is None else dx, gradients


@mlp_gradients_op.register_fake
def _(
    dy: Tensor, x: Tensor, parameters: Sequence[Tensor], saved: Tensor, activation: str, with_dx: bool
) -> tuple[Tensor, Tensor]:
    length = _shape_of(_layers_of(parameters)).gradients[-1]
    return x.new_empty(x.shape if with_dx else 0), x.new_empty(length)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, parameters, ctx.activation = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, *parameters, output[1])


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    x, *parameters, saved = ctx.saved_tensors
    layers, with_dx = _layers_of(parameters), ctx.needs_input_grad[0]
    if differentiable_backward(dy):
        inputs = [*([x] if with_dx else []), *parameters]
        wanted = [one for one in inputs if one.requires_grad]
        with torch.enable_grad():
            y = mlp_reference(x, layers, ctx.activation)
        found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, dy, create_graph=True), strict=True))
        return found.get(id(x)), [found.get(id(one)) for one in parameters], None
    dx, gradients = mlp_gradients_op(dy, x, parameters, saved, ctx.activation, with_dx)
    starts = _shape_of(layers).gradients
    parts = [gradients[at : at + one.numel()].view(one.shape) for at, one in zip(starts, parameters, strict=False)]
    return dx if with_dx else None, parts, None


mlp_op.register_autograd(_backward, setup_context=_setup)


def _check(x: Tensor, layers: Layers) -> None:
    check_float("x", x)
    for index, (weight, bias) in enumerate(layers):
        for name, tensor in ((f"weights[{index}]", weight), (f"biases[{index}]", bias)):
            check_beside(name, tensor, "x", x)
            if tensor is not None and tensor.dtype != x.dtype:
                raise OnelaunchError(
                    f"{name} has dtype {tensor.dtype} and x {x.dtype}: cast one, or use torch.autocast"
                )
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
    return y.view(*x.shape[:-1], y.shape[1])
