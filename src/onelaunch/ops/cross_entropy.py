"""Cross-entropy with its gradient in the same pass: the logits are read once and their gradient written once.

`F.cross_entropy` writes the log-softmax (read + write), reads it for the loss, and reads it again to write the gradient: five
passes over a logits-sized tensor, two such tensors alive. The fused forward pass writes the gradient for an upstream gradient
of one. The backward pass of `loss.backward()` reads that factor on the device and writes nothing: two passes, one tensor.

fp16 logits and the compiled path save two numbers per row instead and read the logits again in the backward pass: three
passes. An fp16 gradient would underflow if it were divided by the batch size and rounded before the loss scale multiplies it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from onelaunch.errors import OnelaunchError
from onelaunch.ops.arguments import KERNEL_DTYPES, KnownCalls, kernels
from onelaunch.ops.call_context import (
    any_autocast,
    autocast_dtype,
    batched,
    differentiable_backward,
    direct_apply,
    dispatch_override,
    inside_transform,
    is_eager_cpu,
    is_eager_cuda,
    wants_gradient,
)
from onelaunch.ops.cross_entropy_arguments import check_loss_options, check_tensors
from onelaunch.ops.cross_entropy_reference import (
    backward_reference,
    checked_reference,
    cross_entropy_reference,
    differentiable_backward_reference,
    empty_outputs,
    forward_reference,
)
from onelaunch.ops.widen import widen

ONE_PASS_DTYPES = (torch.float32, torch.bfloat16)  # their gradient may be rounded before it is rescaled
# From this many classes on, a kernel of some microseconds counts the rows first, so that a batch with ignored rows needs no
# second pass over its gradient. With fewer classes that second pass costs less than the count.
COUNT_FIRST_CLASSES = 512
SMALL_ELEMENTS = 8192  # PyTorch scales a gradient this small: less host time than a launch of our kernel


def _forward_cuda(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str, fp32_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.dtype not in KERNEL_DTYPES or not logits.numel():
        return forward_reference(logits, target, label_smoothing, ignore_index, reduction, fp32_loss)
    loss, lse, count = empty_outputs(logits, reduction, fp32_loss)
    partial = kernels("cross_entropy").cross_entropy_forward(
        logits if logits.stride(1) == 1 else logits.contiguous(), target, loss, lse=lse, dx=None,
        smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction,
    )  # fmt: skip
    if partial is not None:
        count = partial.new_empty(()).copy_(partial[0])
    return loss, lse, count


def _gradient_cuda(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, label_smoothing: float, ignore_index: int,
    reduction: str,
) -> Tensor:  # fmt: skip
    if logits.dtype not in KERNEL_DTYPES or not logits.numel():
        return backward_reference(dloss, logits, target, lse, count, label_smoothing, ignore_index, reduction)
    dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kernels("cross_entropy_backward").cross_entropy_gradient(
        logits if logits.stride(1) == 1 else logits.contiguous(), target, lse, dloss.contiguous(),
        count if reduction == "mean" else None, dx, smoothing=label_smoothing, ignore_index=ignore_index,
    )  # fmt: skip
    return dx


@torch.library.custom_op("onelaunch::cross_entropy", mutates_args=(), device_types="cpu")
def cross_entropy_op(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str, fp32_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return forward_reference(logits, target, label_smoothing, ignore_index, reduction, fp32_loss)


cross_entropy_op.register_kernel("cuda")(_forward_cuda)


@cross_entropy_op.register_fake
def _(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str, fp32_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(logits, reduction, fp32_loss)


@torch.library.custom_op("onelaunch::cross_entropy_gradient", mutates_args=(), device_types="cpu")
def cross_entropy_gradient_op(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, label_smoothing: float, ignore_index: int,
    reduction: str,
) -> Tensor:  # fmt: skip
    return backward_reference(dloss, logits, target, lse, count, label_smoothing, ignore_index, reduction)


cross_entropy_gradient_op.register_kernel("cuda")(_gradient_cuda)


@cross_entropy_gradient_op.register_fake
def _(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, label_smoothing: float, ignore_index: int,
    reduction: str,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, *ctx.options, _ = inputs
    _, lse, count = output
    ctx.mark_non_differentiable(lse, count)
    ctx.save_for_backward(logits, target, lse, count)


def _backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
    if differentiable_backward(dloss):
        logits, target, lse, count = ctx.saved_tensors
        return (
            differentiable_backward_reference(dloss, logits, target, lse, count, *ctx.options),
            None,
            None,
            None,
            None,
            None,
        )
    return cross_entropy_gradient_op(dloss, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_setup)


def _not_twice(gradient: Tensor) -> Tensor:
    """The gradient; differentiating it raises an error."""
    message = (
        b"onelaunch.cross_entropy wrote its gradient in the forward pass, which cannot be differentiated:"
        b" use torch.nn.functional.cross_entropy for second derivatives"
    )
    return torch._C._functions.DelayedError(message, 1)(gradient.detach().requires_grad_())


@functools.cache
def _scalar(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


class _EagerCrossEntropy(torch.autograd.Function):
    """Writes the gradient in the forward pass. Backward rescales it in place, or a copy if the graph is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: tuple[float, int, str, bool]) -> Tensor:
        smoothing, ignore_index, reduction, fp32_loss = options
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        dtype = torch.float32 if fp32_loss else logits.dtype
        if reduction == "none":
            loss = logits.new_empty(logits.shape[0], dtype=dtype)
        else:
            loss = torch.empty_like(_scalar(logits.device, dtype))  # half the Python time of any alternative
        count_first = reduction == "mean" and logits.shape[1] >= COUNT_FIRST_CLASSES
        dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
        partial = kernels("cross_entropy").cross_entropy_forward(
            logits, target, loss, lse=None, dx=dx, smoothing=smoothing, ignore_index=ignore_index,
            reduction=reduction, count_first=count_first,
        )  # fmt: skip
        count = partial if reduction == "mean" and not count_first else None
        ctx.save_for_backward(dx, count, target if reduction == "none" else None)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        dx, count, target = ctx.saved_tensors
        if target is not None:  # one loss per row; that of an ignored row is 0, where dloss may be infinite (a root's)
            dx = dx * dloss.masked_fill(target == ctx.ignore_index, 0)[:, None]
        elif batched(dloss):
            factor = 1.0 if count is None else torch.where(count[0] == 0, 1.0, dx.shape[0] / count[0])
            dx = (dx * (dloss * factor)).to(dx.dtype)
        elif count is None and dx.numel() <= SMALL_ELEMENTS:
            dx = dx * dloss
        else:
            if torch._C._autograd._get_current_graph_task_keep_graph():
                dx = dx.clone()
            kernels("cross_entropy_backward").rescale(dx, dloss, count, dx, dx.shape[0])
        if torch.is_grad_enabled():
            dx = _not_twice(dx)
        return dx, None, None


class _SmallCrossEntropy(_EagerCrossEntropy):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, fill: Any) -> Tensor:
        loss, dx = torch.empty_like(_scalar(logits.device, logits.dtype)), torch.empty_like(logits)
        fill(logits, target, loss, dx)
        ctx.save_for_backward(dx, None, None)
        return loss


_apply, _apply_small = direct_apply(_EagerCrossEntropy), direct_apply(_SmallCrossEntropy)


_known = KnownCalls()  # with the `SmallLoss` of a small batch, else True


def _prepared(logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, reduction: str) -> Any:
    """The prepared launch for a small 2-D batch that is reduced to one number; True for any other call."""
    if logits.dim() != 2 or logits.dtype not in ONE_PASS_DTYPES or target.dtype != torch.int64 or reduction == "none":
        return True
    small = kernels("cross_entropy").SmallLoss
    if not logits.numel() or not small.takes(*logits.shape) or logits.shape[1] >= COUNT_FIRST_CLASSES:
        return True
    return small(logits, smoothing=float(smoothing), ignore_index=int(ignore_index), reduction=reduction)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: None = None,
) -> Tensor:
    """`F.cross_entropy`, with the gradient written in the forward pass.

    `target` holds class indices; class probabilities (a float tensor) are passed on to `F.cross_entropy`. Under
    `torch.autocast` the loss is float32, without a float32 copy of the logits. `weight` must be None.
    """
    if weight is not None:
        raise OnelaunchError(
            "weight is given, and class weights are not fused: use torch.nn.functional.cross_entropy(…, weight=…)"
        )
    if not isinstance(logits, Tensor):
        options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "reduction": reduction}
        return dispatch_override(cross_entropy, "logits", logits, target, **options)
    transforming = inside_transform()
    eager = is_eager_cuda(logits) and not transforming
    known = _known.ask((logits, target), label_smoothing, ignore_index, reduction) if eager else None
    if callable(known):
        if logits.is_contiguous() and target.is_contiguous() and wants_gradient(logits) and not any_autocast():
            return _apply_small(logits, target, known)
    elif known is not True:
        check_loss_options(label_smoothing, ignore_index, reduction)
        if not transforming:
            check_tensors(logits, target)
        if known is not None:
            _known.add(known, _prepared(logits, target, label_smoothing, ignore_index, reduction))
    fp32_loss = autocast_dtype(logits.device) is not None
    if transforming:
        target = target if target.dtype.is_floating_point else target.long()
        return cross_entropy_reference(
            widen(logits) if fp32_loss else logits, target, label_smoothing, ignore_index, reduction
        )
    if target.dtype.is_floating_point:  # PyTorch raises the error if ignore_index is set too
        return cross_entropy_reference(logits, target, label_smoothing, ignore_index, reduction)
    if is_eager_cpu(logits):  # widened, as in the kernels: PyTorch would round each 16-bit log-softmax
        loss = checked_reference(widen(logits), target.long(), label_smoothing, ignore_index, reduction)
        return loss if fp32_loss else loss.to(logits.dtype)
    flat = logits
    if logits.dim() > 2:
        flat = logits.movedim(1, -1).flatten(0, -2)
    elif logits.dim() == 1:
        flat = logits[None]
    rows = target if target.dim() == 1 else target.reshape(-1)
    if rows.dtype != torch.int64 or not rows.is_contiguous():
        rows = rows.to(torch.int64).contiguous()
    arguments = (float(label_smoothing), int(ignore_index), reduction, fp32_loss)
    in_one_pass = eager and flat.dtype in ONE_PASS_DTYPES and flat.numel() > 0
    if in_one_pass and wants_gradient(flat):
        loss = _apply(flat, rows, arguments)
    elif in_one_pass:
        loss = _forward_cuda(flat, rows, *arguments)[0]
    else:
        loss = cross_entropy_op(flat, rows, *arguments)[0]
    return loss.view(target.shape) if reduction == "none" else loss
