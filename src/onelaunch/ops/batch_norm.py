"""Batch norm, activation and dropout: 3 passes over memory forward and 5 backward; dropout saves one bit per element.

`F.dropout(F.relu(F.batch_norm(x)))` takes 3 + 2 + 2 passes and a mask forward, 2 + 2 and 5 backward, and keeps x, the
normalised tensor and the mask. The fused op keeps x only: the activation's derivative is recomputed from it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.activations import activate
from onelaunch.kernels.dropout_key import NO_KEY
from onelaunch.ops.arguments import (
    KERNEL_DTYPES,
    KnownCalls,
    check_activation,
    check_probability,
    kernels,
)
from onelaunch.ops.batch_norm_arguments import check_numbers, check_tensors
from onelaunch.ops.batch_norm_reference import (
    Outputs,
    backward_reference,
    channels_last,
    differentiable_backward_reference,
    empty_like_output,
    empty_outputs,
    forward_reference,
    lines_and_inner,
    move_running,
    statistics_of,
)
from onelaunch.ops.call_context import (
    differentiable_backward,
    direct_apply,
    dispatch_override,
    inside_transform,
    is_eager_cpu,
    is_eager_cuda,
    keep_random_calls_separate,
    saves_through_hooks,
    wants_gradient,
)
from onelaunch.ops.dropout import draw_key


def _layout(x: Tensor) -> Any:
    layout = kernels("batch_norm_tiles").Layout
    lines, inner = lines_and_inner(x)
    if x.shape[1] == 1:
        return layout(1, 1, inner)
    if inner == x.shape[1] and (x.dim() == 2 or channels_last(x) is not None):
        return layout(lines, inner, 0)
    return layout(x.shape[0], x.shape[1], inner)


def _has_kernels(x: Tensor) -> bool:
    """Whether the kernels take x. With channels first, channels are columns of the grid, and CUDA allows 65,535."""
    return x.dtype in KERNEL_DTYPES and x.numel() > 0 and (x.dim() == 2 or x.shape[1] <= 65_535)


def _updates_in_place(statistic: Tensor | None) -> bool:
    """Whether a kernel can update this running statistic in its own memory."""
    return statistic is None or statistic.is_contiguous()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _forward_cuda(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, activation: str | None, p: float, momentum: float | None = None,
) -> Outputs:  # fmt: skip
    """With a momentum the kernel updates the running statistics; without one they are only read."""
    if not _has_kernels(x):
        return forward_reference(x, running_mean, running_var, weight, bias, training, eps, activation, p)
    y, statistics, bits = empty_outputs(x, training, p)
    if x.stride() != y.stride():
        x = torch.empty_like(y).copy_(x)
    weight, bias = _contiguous(weight), _contiguous(bias)
    layout = _layout(x)
    key = draw_key(x.device) if p else NO_KEY  # before both kernels, so that nothing runs between them
    if training:
        moved = (running_mean, running_var) if momentum is not None else (None, None)
        kernels("batch_norm").batch_statistics(
            x, layout, statistics, *moved, momentum=float(momentum or 0), eps=float(eps)
        )
    else:
        assert running_mean is not None
        assert running_var is not None
        statistics[0].copy_(running_mean)
        torch.rsqrt(running_var.to(torch.float32) + eps, out=statistics[1])
    kept = bits if p else None
    kernels("batch_norm").normalise(x, layout, statistics, weight, bias, y, kept, activation=activation, p=p, key=key)
    return y, statistics, bits


def _backward_cuda(
    dy: Tensor, x: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _has_kernels(x):
        return backward_reference(dy, x, statistics, bits, weight, bias, training, activation, p)
    dx = empty_like_output(x)
    if x.stride() != dx.stride():
        x = torch.empty_like(dx).copy_(x)
    weight, bias = _contiguous(weight), _contiguous(bias)
    if dy.stride() != dx.stride():
        dy = torch.empty_like(dx).copy_(dy)
    sums = torch.empty_like(statistics[:2])
    kernels("batch_norm_backward").batch_norm_backward(
        dy, x, _layout(x), bits if p else None, statistics, weight, bias, dx, sums,
        training=training, activation=activation, p=p,
    )  # fmt: skip
    return dx, sums


@torch.library.custom_op(
    "onelaunch::batch_norm", mutates_args=(), device_types="cpu", tags=(torch.Tag.nondeterministic_seeded,)
)
def batch_norm_op(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, activation: str | None, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return forward_reference(x, running_mean, running_var, weight, bias, training, eps, activation, p)


@batch_norm_op.register_kernel("cuda")
def _(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, activation: str | None, p: float,
) -> Outputs:  # fmt: skip
    return _forward_cuda(x, running_mean, running_var, weight, bias, training, eps, activation, p)


@batch_norm_op.register_fake
def _(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, activation: str | None, p: float,
) -> Outputs:  # fmt: skip
    keep_random_calls_separate()
    return empty_outputs(x, training, p)


@torch.library.custom_op("onelaunch::batch_norm_backward", mutates_args=(), device_types="cpu")
def batch_norm_backward_op(
    dy: Tensor, x: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return backward_reference(dy, x, statistics, bits, weight, bias, training, activation, p)


batch_norm_backward_op.register_kernel("cuda")(_backward_cuda)


@batch_norm_backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return empty_like_output(x), torch.empty_like(statistics[:2])


def _save(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, output: Outputs, eps: float, options: Any
) -> None:
    _, statistics, bits = output
    ctx.eps, ctx.options = eps, options
    ctx.save_for_backward(x, statistics, bits, weight, bias)


def _gradients(ctx: Any, dy: Tensor, backward: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, statistics, bits, weight, bias = ctx.saved_tensors
    if differentiable_backward(dy):
        mean, rstd, *_ = statistics_of(x, ctx.eps) if ctx.options[0] else statistics
        dx, dbias, dweight = differentiable_backward_reference(dy, x, mean, rstd, bits, weight, bias, *ctx.options)
        dx = dx.to(x.dtype)
    else:
        dx, (dbias, dweight) = backward(dy, x, statistics, bits, weight, bias, *ctx.options)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, _, _, weight, bias, training, eps, activation, p = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, x, weight, bias, output, eps, (training, activation, p))


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    dx, dweight, dbias = _gradients(ctx, dy, batch_norm_backward_op)
    return dx, None, None, dweight, dbias, None, None, None, None


batch_norm_op.register_autograd(_backward, setup_context=_setup)


class _EagerBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Any, options: tuple[Any, ...]
    ) -> Tensor:
        mean, var = running
        training, momentum, eps, activation, p = options
        output = _forward_cuda(x, mean, var, weight, bias, training, eps, activation, p, momentum)
        _save(ctx, x, weight, bias, output, eps, (training, activation, p))
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return *_gradients(ctx, dy, _backward_cuda), None, None


_apply = direct_apply(_EagerBatchNorm)


_known = KnownCalls()


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`F.dropout(act(F.batch_norm(x, ...)))`; in training the running statistics are updated as PyTorch updates them.

    x: `[batch, channels, ...]`, also channels-last. The result has its shape and dtype.
    running_mean, running_var: `[channels]`, updated in training, where they may be None.
    weight, bias: `[channels]`, or None for a batch norm without them.
    training: whether to use the statistics of the batch, and to apply dropout.
    momentum, eps: as in `F.batch_norm`.
    activation: a name such as "relu" or "gelu", or None.
    dropout: the probability to drop an element while training.
    """
    if not isinstance(x, Tensor):
        named = {"momentum": momentum, "eps": eps, "activation": activation, "dropout": dropout}
        return dispatch_override(
            batch_norm, "x", x, running_mean, running_var, weight, bias, training=training, **named
        )
    transforming = inside_transform()
    eager = is_eager_cuda(x) and not transforming
    options = (training, momentum, eps, activation, dropout)
    known = _known.ask((x, running_mean, running_var, weight, bias), *options) if eager else None
    if known is not True:
        check_numbers(eps, momentum, running_mean, running_var)
        check_activation(activation)
        check_probability("dropout", dropout)
        if not transforming:
            check_tensors(x, running_mean, running_var, weight, bias, training)
        if known is not None:
            _known.add(known)
    p = float(dropout) if training else 0.0
    running = (running_mean, running_var)
    if transforming or (p == 0 and is_eager_cpu(x, weight, bias, *running)):
        z = F.batch_norm(x, *running, weight, bias, bool(training), momentum, eps)
        return F.dropout(activate(z, activation), p)
    if eager and _updates_in_place(running_mean) and _updates_in_place(running_var) and _has_kernels(x):
        if wants_gradient(x, weight, bias):
            y = _apply(x, weight, bias, running, (training, momentum, eps, activation, p))
        else:
            y = _forward_cuda(x, *running, weight, bias, training, eps, activation, p, momentum)[0]
        if training and running_mean is not None and running_var is not None:
            torch.autograd.graph.increment_version((running_mean, running_var))
        return y
    moved = training and running_mean is not None and x.numel() > 0
    first = moved and saves_through_hooks()  # a checkpoint's recomputation stops once the op has saved its tensors
    if first:
        move_running(running, statistics_of(x.detach(), eps), momentum)
    y, statistics, _ = batch_norm_op(x, *running, weight, bias, training, eps, activation, p)
    if moved and not first:
        move_running(running, statistics, momentum)
    return y


def batch_norm_of(norm: Any, x: Tensor, activation: str | None, dropout: float) -> Tensor:
    """The output of PyTorch's module `norm` in its mode, then activation and dropout; updates its number of batches."""
    norm._check_input_dim(x)
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1 / float(norm.num_batches_tracked)
    moved = not norm.training or norm.track_running_stats
    return batch_norm(
        x,
        norm.running_mean if moved else None,
        norm.running_var if moved else None,
        norm.weight,
        norm.bias,
        training=norm.training or norm.running_mean is None,
        momentum=momentum,
        eps=norm.eps,
        activation=activation,
        dropout=dropout,
    )
