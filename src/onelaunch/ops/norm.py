"""Layer norm and RMS norm over the last dimension, with the dropout and the residual addition before them.

`F.layer_norm(F.dropout(x) + residual)` takes 2 + 3 + 2 passes over memory and a mask forward, 3 + 2 passes and two reductions
over rows backward. The fused op reads x and the residual and writes the sum and y; backward it reads the gradient and the sum
and writes the gradients, with dweight and dbias in the same pass. It keeps the sum, which pre-norm networks keep anyway, two
numbers per row, and one bit per element for dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.errors import OnelaunchError
from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.ops.arguments import (
    KERNEL_DTYPES,
    KnownCalls,
    check_beside,
    check_float,
    check_number,
    check_probability,
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
    keep_random_calls_separate,
    wants_gradient,
)
from onelaunch.ops.dropout import draw_key
from onelaunch.ops.norm_reference import (
    Outputs,
    backward_reference,
    empty_gradients,
    empty_outputs,
    forward_reference,
    gradients_reference,
    norm_reference,
    standardised,
)

MAX_UNITS = 8192  # per row: the kernels hold a row in registers


def _has_kernels(x: Tensor, *others: Tensor | None) -> bool:
    given = [x, *(one for one in others if one is not None)]
    return all(one.dtype in KERNEL_DTYPES for one in given) and 0 < x.shape[-1] <= MAX_UNITS


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _filled(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _forward_cuda(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, p: float,
    centered: bool, dtype: torch.dtype, save: bool,
) -> Outputs:  # fmt: skip
    if not x.numel() or not _has_kernels(x, residual, weight, bias):
        return forward_reference(x, residual, weight, bias, eps, p, centered, dtype, save)
    outputs = empty_outputs(x, residual, p, centered, dtype, save)
    tensors = [_contiguous(one) for one in (x, residual, weight, bias)]
    kernels("norm").norm_forward(
        *tensors, outputs[0], *map(_filled, outputs[1:]),
        eps=float(eps), p=p, key=draw_key(x.device) if p else NO_KEY, centered=centered,
    )  # fmt: skip
    return outputs


def _backward_cuda(
    dy: Tensor, dsum: Tensor | None, s: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, p: float,
    biased: bool, x_type: torch.dtype, residual_type: torch.dtype | None, sums_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not s.numel() or not _has_kernels(s, dy, dsum, weight) or statistics.dtype != torch.float32:
        return backward_reference(
            dy, dsum, s, statistics, bits, weight, p, biased, x_type, residual_type, sums_type
        )  # fmt: skip
    dx, dresidual, sums = empty_gradients(s, weight, p, biased, x_type, residual_type, sums_type)
    dy, dsum, s, weight = (_contiguous(one) for one in (dy, dsum, s, weight))  # type: ignore[assignment]
    kernels("norm_backward").norm_backward(
        dy, dsum, s, statistics, weight, _filled(bits), dx, _filled(dresidual), sums,
        p=p, centered=len(statistics) == 2,
    )  # fmt: skip
    return dx, dresidual, sums


@torch.library.custom_op(
    "onelaunch::norm", mutates_args=(), device_types="cpu", tags=(torch.Tag.nondeterministic_seeded,)
)
def norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, p: float,
    centered: bool, dtype: torch.dtype, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return forward_reference(x, residual, weight, bias, eps, p, centered, dtype, save)


norm_op.register_kernel("cuda")(_forward_cuda)


@norm_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, p: float,
    centered: bool, dtype: torch.dtype, save: bool,
) -> Outputs:  # fmt: skip
    keep_random_calls_separate()
    return empty_outputs(x, residual, p, centered, dtype, save)


@torch.library.custom_op("onelaunch::norm_backward", mutates_args=(), device_types="cpu")
def norm_backward_op(
    dy: Tensor, dsum: Tensor | None, s: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, p: float,
    biased: bool, x_type: torch.dtype, residual_type: torch.dtype | None, sums_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward_reference(dy, dsum, s, statistics, bits, weight, p, biased, x_type, residual_type, sums_type)


norm_backward_op.register_kernel("cuda")(_backward_cuda)


@norm_backward_op.register_fake
def _(
    dy: Tensor, dsum: Tensor | None, s: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, p: float,
    biased: bool, x_type: torch.dtype, residual_type: torch.dtype | None, sums_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(s, weight, p, biased, x_type, residual_type, sums_type)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, residual, weight, bias, eps, p, centered, *_ = inputs
    _, s, statistics, bits = output
    summed = residual is not None or p > 0
    ctx.mark_non_differentiable(statistics, *([] if summed else [s]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(s if summed else x, statistics, bits, weight)
    ctx.eps, ctx.p, ctx.centered = eps, p, centered
    ctx.types = [None if one is None else one.dtype for one in (x, residual, weight, bias)]


def _gradients(ctx: Any, dy: Tensor | None, dsum: Tensor | None, backward: Any) -> tuple[Any, ...]:
    s, statistics, bits, weight = ctx.saved_tensors
    x_type, residual_type, weight_type, bias_type = ctx.types
    if dy is None:
        if dsum is None:
            return (None,) * 9
        dy = torch.zeros_like(dsum)
    gradients: list[Tensor | None]
    if differentiable_backward(dy):
        gradients = list(
            gradients_reference(dy, dsum, s, standardised(s, ctx.eps, ctx.centered)[1], bits, weight, ctx.p)
        )
    else:
        biased, sum_types = bias_type is not None, {one for one in (weight_type, bias_type) if one is not None}
        sums_type = sum_types.pop() if len(sum_types) == 1 else torch.float32
        dx, dresidual, sums = backward(
            dy, dsum, s, statistics, bits, weight, ctx.p, biased, x_type, residual_type, sums_type
        )
        dresidual = dresidual if ctx.p or residual_type != x_type else dx
        gradients = [dx, dresidual, None if weight is None else sums[0], sums[-1] if biased else None]
    return *(
        None if one is None or dtype is None else one.to(dtype)
        for one, dtype in zip(gradients, ctx.types, strict=True)
    ), *(None,) * 5  # fmt: skip


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return _gradients(ctx, dy, dsum, norm_backward_op)


norm_op.register_autograd(_backward, setup_context=_setup)


class _EagerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _forward_cuda(*inputs)
        _setup(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, dy, dsum, _backward_cuda)


_apply = direct_apply(_EagerNorm)
_known = KnownCalls()


def _check_numbers(dropout: float, eps: float | None) -> None:
    check_probability("dropout", dropout)
    if eps is not None and not check_number("eps", eps, "a small number, such as 1e-5") >= 0:
        raise OnelaunchError(f"eps={eps!r} must not be below 0: pass a small number, such as 1e-5")


def _check_tensors(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    check_float("x", x)
    if not x.dim():
        raise OnelaunchError("x has no dimensions: pass [..., units]")
    per_unit = "one number per unit of x's last dimension"
    for name, tensor, shape, about in (
        ("weight", weight, x.shape[-1:], per_unit),
        ("bias", bias, x.shape[-1:], per_unit),
        ("residual", residual, x.shape, "that of x"),
    ):
        check_beside(name, tensor, "x", x)
        if tensor is not None and tensor.shape != shape:
            given = f"{name} has shape {tuple(tensor.shape)} and x {tuple(x.shape)}"
            raise OnelaunchError(f"{given}: pass {name} of shape {tuple(shape)}, {about}")


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, dropout: float, training: bool,
    eps: float | None, return_sum: bool, centered: bool,
) -> Any:  # fmt: skip
    transforming = inside_transform()
    eager = is_eager_cuda(x) and not transforming
    known = _known.ask((x, weight, bias, residual), dropout, eps) if eager else None
    if known is not True:
        _check_numbers(dropout, eps)
        if not transforming:
            _check_tensors(x, weight, bias, residual)
        if known is not None:
            _known.add(known)
    p = float(dropout) if training else 0.0
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if eps is None:
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    if x.is_cuda and dtype != torch.float64 and autocast_dtype(x.device) is not None:
        dtype = torch.float32  # as PyTorch's norms under autocast; on a CPU they keep the type
    tensors = (weight, bias, residual)
    alike = eager or all(one is None or one.dtype == x.dtype for one in tensors)
    if transforming or (not eager and p == 0 and alike and is_eager_cpu(x, *tensors)):
        s = F.dropout(x, p) if p else x
        s = s if residual is None else s + residual
        fused = x.is_cuda and not centered  # PyTorch's kernel for RMS norm there, which cannot be transformed twice
        norm = _pytorch_norm if alike and not fused else norm_reference
        y = norm(s, weight, bias, eps, centered).to(dtype)
        return (y, s) if return_sum else y
    gradient = wants_gradient(x, *tensors)
    arguments = (x, residual, weight, bias, float(eps), p, centered, dtype, gradient or bool(return_sum))
    if not eager:
        y, s, *_ = norm_op(*arguments)
    elif gradient:
        y, s = _apply(*arguments)
    else:
        y, s, *_ = _forward_cuda(*arguments)
    if not return_sum:
        return y
    return y, s if p or residual is not None else x


def _pytorch_norm(s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    if centered:
        return F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return F.rms_norm(s, s.shape[-1:], weight, eps)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dropout: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    return_sum: bool = False,
) -> Any:
    """`F.layer_norm(F.dropout(x, dropout, training) + residual)` over the last dimension, in one kernel each way.

    x: `[..., units]`. The result has its shape, and the dtype of the sum (float32 under CUDA autocast, as `F.layer_norm`).
    weight, bias: `[units]`, or None for a norm without them.
    residual: a tensor of x's shape that is added to x, or None.
    dropout: the probability to drop an element of x, if `training` is True.
    eps: added to the variance.
    return_sum: whether to return the tuple (norm, sum), for networks that add to the sum later (pre-norm).
    """
    if not isinstance(x, Tensor):
        options = {"dropout": dropout, "training": training, "eps": eps, "return_sum": return_sum}
        return dispatch_override(layer_norm, "x", x, weight, bias, residual=residual, **options)
    return _norm(x, weight, bias, residual, dropout, training, eps, return_sum, True)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dropout: float = 0.0,
    training: bool = True,
    eps: float | None = 1e-6,
    return_sum: bool = False,
) -> Any:
    """`F.rms_norm(F.dropout(x, dropout, training) + residual)` over the last dimension, in one kernel each way.

    x: `[..., units]`. The result has its shape, and the dtype of the sum (float32 under CUDA autocast, as `F.rms_norm`).
    weight: `[units]`, or None for a norm without it.
    residual: a tensor of x's shape that is added to x, or None.
    dropout: the probability to drop an element of x, if `training` is True.
    eps: added to the mean square; None is the smallest difference from 1 of float32 (of float64 for float64).
    return_sum: whether to return the tuple (norm, sum), for networks that add to the sum later (pre-norm).
    """
    if not isinstance(x, Tensor):
        options = {"dropout": dropout, "training": training, "eps": eps, "return_sum": return_sum}
        return dispatch_override(rms_norm, "x", x, weight, residual=residual, **options)
    return _norm(x, weight, None, residual, dropout, training, eps, return_sum, False)
