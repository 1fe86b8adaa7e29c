"""Linear, activation and dropout in one op: `dropout(act(x · Wᵀ + b))`.

Forward runs one of four implementations, whichever was measured fastest on this chip for the shape (see `linear_choice`): a
Triton GEMM with a fused epilogue; a CUDA C++ GEMM that overlaps a tile's epilogue with the next tile's products; cuBLASLt with
its own epilogue; or cuBLAS followed by one elementwise pass.

Backward is one pass for the activation's derivative, the mask and the bias gradient, and two library GEMMs. It needs 1/8 byte
per element for relu with dropout. Otherwise it needs the output if that determines the derivative, as for tanh, or else the
value before the activation, z, as for gelu. The gradient of z is then written over z. The input is released as soon as the
weight's gradient is computed, before its own gradient is allocated.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.errors import OnelaunchError
from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.ops import linear_choice
from onelaunch.ops.arguments import (
    KERNEL_DTYPES,
    KnownCalls,
    check_activation,
    check_beside,
    check_float,
    check_probability,
    check_same_dtype,
    kernels,
)
from onelaunch.ops.call_context import (
    autocast_dtype,
    differentiable_backward,
    direct_apply,
    dispatch_override,
    inside_transform,
    is_eager_cpu,
    is_eager_cuda,
    is_traced,
    keep_random_calls_separate,
    saves_through_hooks,
    wants_gradient,
)
from onelaunch.ops.dropout import bytes_for, draw_key
from onelaunch.ops.linear_reference import (
    Outputs,
    backward_needs,
    backward_reference,
    differentiable_backward_reference,
    empty_outputs,
    forward_reference,
    linear_reference,
    saves_z,
)
from onelaunch.ops.second_derivatives import Unsaved


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    if matrix.is_contiguous():
        return matrix
    down, along = matrix.stride()
    return matrix if along == 1 and down >= matrix.shape[1] else matrix.contiguous()


def _forward_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if x.dtype not in KERNEL_DTYPES or not (x.numel() and weight.numel()):
        return forward_reference(x, weight, bias, activation, p, save)
    x, weight = _with_contiguous_rows(x), _with_contiguous_rows(weight)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    shape = (x.shape[0], weight.shape[0])
    y = x.new_empty(shape)
    z = torch.empty_like(y) if save and saves_z(activation) else None
    bits = y.new_empty(bytes_for(*shape), dtype=torch.uint8) if p else None
    key = draw_key(x.device) if p else NO_KEY
    call = linear_choice.Call(x, weight, bias, y, z, bits, activation, p, key)
    linear_choice.choose_implementation(call).run(call)
    return y, z, bits


def _backward_cuda(
    dy: Tensor, saved: Tensor, bits: Tensor, activation: str | None, p: float, over_z: bool = False
) -> tuple[Tensor, Tensor]:
    """(dz, dbias). `over_z`: if z was saved, this is its last use and no one else holds it, so that dz may overwrite it."""
    if dy.dtype not in KERNEL_DTYPES or not dy.numel():
        return backward_reference(dy, saved, bits, activation, p)
    dy = dy.contiguous()
    needs = backward_needs(activation, p)
    dz = saved if over_z and needs == "z" else torch.empty_like(dy)
    dbias = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
    kernels("activation_dropout").activation_dropout_backward(
        dy, saved.contiguous() if needs != "nothing" else None, bits if p else None, dz, dbias,
        activation=None if needs == "nothing" else activation, from_output=needs == "output", p=p,
    )  # fmt: skip
    return dz, dbias


@torch.library.custom_op(
    "onelaunch::linear", mutates_args=(), device_types="cpu", tags=(torch.Tag.nondeterministic_seeded,)
)
def linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return forward_reference(x, weight, bias, activation, p, save)


@linear_op.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, save: bool) -> Outputs:
    y, z, bits = _forward_cuda(x, weight, bias, activation, p, save)
    return y, x.new_empty((0, 0)) if z is None else z, y.new_empty((0, 0), dtype=torch.uint8) if bits is None else bits


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, save: bool) -> Outputs:
    keep_random_calls_separate()
    return empty_outputs(x, weight, activation, p, save)


@torch.library.custom_op("onelaunch::linear_slope", mutates_args=(), device_types="cpu")
def linear_slope_op(dy: Tensor, saved: Tensor, bits: Tensor, activation: str | None, p: float) -> tuple[Tensor, Tensor]:
    """(dz, dbias): the gradient with respect to the activation's input, and its column sums."""
    dz, dbias = backward_reference(dy, saved, bits, activation, p)
    return dz.contiguous(), dbias


linear_slope_op.register_kernel("cuda")(_backward_cuda)


@linear_slope_op.register_fake
def _(dy: Tensor, saved: Tensor, bits: Tensor, activation: str | None, p: float) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape[1])


def _save(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float, out: tuple[Any, Any, Any]
) -> None:  # fmt: skip
    y, z, bits = out
    ctx.activation, ctx.p, ctx.bias = activation, p, bias
    eager = not is_traced(x)
    with_x, with_weight = eager or weight.requires_grad, eager or x.requires_grad  # each is for the other's gradient
    ctx.unsaved = Unsaved(
        "onelaunch.linear", {"x": None if with_x else x, "weight": None if with_weight else weight, "bias": bias}
    )
    saved = {"output": y, "z": z, "nothing": None}[backward_needs(activation, p)]
    ctx.save_for_backward(x if with_x else None, weight if with_weight else None, saved, bits)


def _differentiable_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same gradients in differentiable ops, from the inputs."""
    x, weight, _, bits = ctx.saved_tensors
    other_x, other_weight, bias = ctx.unsaved.unchanged()
    x, weight = other_x if x is None else x, other_weight if weight is None else weight
    return differentiable_backward_reference(dy, x, weight, bias, bits, ctx.activation, ctx.p)


def _gradients(ctx: Any, dy: Tensor, slope: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if differentiable_backward(dy):
        return _differentiable_gradients(ctx, dy)
    x, weight, saved, bits = ctx.saved_tensors
    if slope is linear_slope_op:  # a custom op takes empty tensors instead of None
        saved = dy.new_empty((0, 0)) if saved is None else saved
        bits = dy.new_empty((0, 0), dtype=torch.uint8) if bits is None else bits
    else:
        ctx.maybe_clear_saved_tensors()  # no-op if the graph is kept; else these are the only references
    dz, dbias = slope(dy, saved, bits, ctx.activation, ctx.p)
    del saved, bits
    dweight = dz.t() @ x if ctx.needs_input_grad[1] else None
    del x
    return (
        dz @ weight if ctx.needs_input_grad[0] else None,
        dweight,
        None if ctx.bias is None else dbias.to(ctx.bias.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, weight, bias, activation, p, _ = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, x, weight, bias, activation, p, output)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    return *_gradients(ctx, dy, linear_slope_op), None, None, None


linear_op.register_autograd(_backward, setup_context=_setup)


class _EagerLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, p: float) -> Tensor:
        out = _forward_cuda(x, weight, bias, activation, p, True)
        _save(ctx, x, weight, bias, activation, p, out)
        ctx.owns_z = not saves_through_hooks()  # else a hook may hold z
        return out[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            return *_gradients(ctx, dy, linear_slope_op), None, None
        last = ctx.owns_z and not torch._C._autograd._get_current_graph_task_keep_graph()
        return *_gradients(ctx, dy, functools.partial(_backward_cuda, over_z=last)), None, None


_apply = direct_apply(_EagerLinear)


def _is_cast(x: Tensor, autocast: torch.dtype | None) -> bool:
    return autocast is not None and x.dtype != torch.float64


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, autocast: torch.dtype | None) -> None:
    check_float("x", x)
    if weight is None:
        check_float("weight", weight)
    check_beside("weight", weight, "x", x)
    check_beside("bias", bias, "x", x)
    if weight.dim() != 2:
        raise OnelaunchError(f"weight has shape {tuple(weight.shape)}: pass [out_features, in_features]")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise OnelaunchError(
            f"x has shape {tuple(x.shape)}, which does not fit weight {tuple(weight.shape)}: pass [..., {weight.shape[1]}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OnelaunchError(
            f"bias has shape {tuple(bias.shape)}: pass {tuple(weight.shape[:1])}, one number per row of weight"
        )
    if not _is_cast(x, autocast):
        check_same_dtype("weight", weight, x)
        check_same_dtype("bias", bias, x)


_known = KnownCalls()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """`F.dropout(act(F.linear(x, weight, bias)), dropout, training)`, `[..., out_features]`.

    x: `[..., in_features]`; weight: `[out_features, in_features]`; bias: `[out_features]` or None.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element, if `training` is True. A module passes `self.training`.
    """
    if not isinstance(x, Tensor):
        return dispatch_override(
            linear, "x", x, weight, bias, activation=activation, dropout=dropout, training=training
        )
    transforming = inside_transform()
    eager = is_eager_cuda(x) and not transforming
    dtype = autocast_dtype(x.device)
    known = _known.ask((x, weight, bias), activation, dropout, dtype) if eager else None
    if known is not True:
        check_activation(activation)
        check_probability("dropout", dropout)
        if not transforming:
            _check(x, weight, bias, dtype)
        if known is not None:
            _known.add(known)
    p = float(dropout) if training else 0.0
    if transforming:
        return F.dropout(linear_reference(x, weight, bias, activation, None, 0.0), p)
    if _is_cast(x, dtype):
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if p == 0 and (activation is None or is_eager_cpu(x, weight, bias)):
        return linear_reference(x, weight, bias, activation, None, 0.0)
    flat = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]
    save = wants_gradient(x, weight, bias)
    if not eager:
        y = linear_op(flat, weight, bias, activation, p, save)[0]
    elif save:
        y = _apply(flat, weight, bias, activation, p)
    else:
        y = _forward_cuda(flat, weight, bias, activation, p, False)[0]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
