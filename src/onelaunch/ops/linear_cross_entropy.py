"""A linear layer and the cross entropy of its outputs, in chunks of rows: the logits never exist as a whole.

A language model's logits are its largest tensor: 8 x 1024 tokens of 50,257 classes are 0.8 GB in bf16, and their gradient as
much again. Here a chunk's logits are multiplied, turned into their gradient, and multiplied into dx and dweight at once, so
that one or two buffers of CHUNK_BYTES are enough. Forward computes the gradients of the summed loss; backward multiplies them
by the upstream gradient and, for a mean, by one over the number of rows: fp16 gradients under a loss scale do not underflow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.integers import ceil_div, round_up
from onelaunch.ops.arguments import KERNEL_DTYPES, check_beside, check_float, check_same_dtype, kernels
from onelaunch.ops.call_context import autocast_dtype, differentiable_backward, inside_transform
from onelaunch.ops.cross_entropy import cross_entropy
from onelaunch.ops.cross_entropy_arguments import check_loss_options
from onelaunch.ops.cross_entropy_reference import checked_reference
from onelaunch.ops.second_derivatives import differentiable_gradients
from onelaunch.ops.widen import widen

INDEX_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
CLASS_MULTIPLE = 8
CHUNK_BYTES = 3 * 2**25  # of logits at a time: efficient products, and little beside a model's activations
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # loss, dx, dweight and dbias of the summed loss, scale


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """What the op computes, with the logits stored whole; differentiable."""
    logits = widen(F.linear(x, weight, bias))
    return F.cross_entropy(
        logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
    )


def _with_aligned_classes(weight: Tensor, bias: Tensor | None, smoothing: float) -> tuple[Tensor, Tensor | None]:
    """The layer with classes of probability 0 added, so that a row of logits is a whole number of 16-byte pieces.

    cuBLAS takes several times as long for other rows: GPT-2's step 31.6 instead of 19 ms, with its 50,257 classes (H200).
    """
    missing = -weight.shape[0] % CLASS_MULTIPLE
    if not weight.is_cuda or smoothing or not missing:
        return weight, bias
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=float("-inf"))


def chunk_rows(rows: int, classes: int, element_size: int) -> int:
    """Rows of each of as few equal chunks as possible: a multiple of 64, for the products' tiles."""
    chunks = max(1, ceil_div(rows * classes * element_size, CHUNK_BYTES))
    return round_up(max(1, ceil_div(rows, chunks)), 64)


def _summed_loss(
    logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows in fp32 (fp64 for fp64), and its gradient if asked for (else an empty tensor).

    The gradient may take the memory of the logits.
    """
    if logits.is_cuda and logits.dtype in KERNEL_DTYPES:
        loss = torch.empty((), dtype=torch.float32, device=logits.device)
        in_place = logits.shape[1] * logits.element_size() % 16 == 0  # no two rows share a 16-byte piece
        dlogits = (logits if in_place else torch.empty_like(logits)) if gradient else None
        kernels("cross_entropy").cross_entropy_forward(
            logits, target, loss, lse=None, dx=dlogits, smoothing=smoothing, ignore_index=ignore_index, reduction="sum"
        )
        return loss, logits.new_empty(0) if dlogits is None else dlogits
    wide = widen(logits)
    loss = checked_reference(wide, target, smoothing, ignore_index, "sum")
    if not gradient:
        return loss, logits.new_empty(0)
    counts = (target != ignore_index)[:, None]
    expected = torch.full_like(wide, smoothing / wide.shape[1])
    expected.scatter_add_(1, torch.where(counts, target[:, None], 0), wide.new_full((len(wide), 1), 1 - smoothing))
    return loss, torch.where(counts, torch.softmax(wide, 1) - expected, 0).to(logits.dtype)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with `total` in fp32 for 16-bit factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float, ignore_index: int, reduction: str,
    gradient: bool,
) -> Outputs:  # fmt: skip
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    loss = torch.zeros((), dtype=wide, device=x.device)
    classes, biased = weight.shape[0], gradient and bias is not None
    weight, bias = _with_aligned_classes(weight, bias, smoothing)
    dx = torch.empty_like(x) if gradient else x.new_empty(0)
    dweight = torch.zeros(weight.shape, dtype=wide, device=x.device) if gradient else x.new_empty(0)
    dbias = torch.zeros(weight.shape[:1], dtype=wide, device=x.device) if biased else x.new_empty(0)
    rows = chunk_rows(len(x), weight.shape[0], x.element_size())
    for first in range(0, len(x), rows):
        part = slice(first, first + rows)
        logits = F.linear(x[part], weight, bias)
        chunk_loss, dlogits = _summed_loss(logits, target[part], smoothing, ignore_index, gradient)
        loss += chunk_loss
        if gradient:
            torch.mm(dlogits, weight, out=dx[part])
            _accumulate(dweight, dlogits.t(), x[part])
        if biased and dlogits.dtype != wide:  # as a product the sum of columns is faster, and exact for 16 bits
            _accumulate(dbias[None], dlogits.new_ones(1, len(dlogits)), dlogits)
        elif biased:
            dbias += dlogits.sum(0)
        del logits, dlogits  # else they would live until the next chunk's are computed
    scale = torch.ones((), dtype=wide, device=x.device)
    if reduction == "mean":
        scale = 1 / (target != ignore_index).sum().to(wide)
        loss *= scale  # as in PyTorch, NaN where no row counts
        scale = torch.where(scale.isfinite(), scale, 0)
    if not gradient:
        return loss, dx, dweight, dbias, scale
    dbias = dbias[:classes].to(_sum_dtype(weight)) if biased else dbias
    return loss, dx, dweight[:classes].to(_sum_dtype(weight)), dbias, scale


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The type of a gradient summed over all rows and not yet scaled: fp16 could overflow."""
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


@torch.library.custom_op("onelaunch::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float, ignore_index: int, reduction: str,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(x, weight, bias, target, smoothing, ignore_index, reduction, gradient)


@linear_cross_entropy_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float, ignore_index: int, reduction: str,
    gradient: bool,
) -> Outputs:  # fmt: skip
    loss = x.new_empty((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    if not gradient:
        return loss, x.new_empty(0), x.new_empty(0), x.new_empty(0), torch.empty_like(loss)
    dbias = x.new_empty(0) if bias is None else x.new_empty(bias.shape, dtype=_sum_dtype(bias))
    dweight = x.new_empty(weight.shape, dtype=_sum_dtype(weight))
    return loss, torch.empty_like(x), dweight, dbias, torch.empty_like(loss)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, weight, bias, target, *ctx.options, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, target, *output[1:])


def _backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, target, *gradients, scale = ctx.saved_tensors
    inputs = (x, weight, bias)
    if differentiable_backward(dloss):

        def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy_reference(x, weight, bias, target, *ctx.options)

        found = differentiable_gradients(function, inputs, dloss)
    else:
        factor = dloss * scale
        found = [
            (gradient * factor).to(one.dtype) if needed else None
            for gradient, one, needed in zip(gradients, inputs, ctx.needs_input_grad, strict=False)
        ]
    return *found, None, None, None, None, None


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, cast: bool) -> None:
    check_float("x", x)
    check_float("weight", weight)
    check_beside("weight", weight, "x", x)
    check_beside("bias", bias, "x", x)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise OnelaunchError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: pass [..., features] and [classes, features]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OnelaunchError(
            f"bias has shape {tuple(bias.shape)}: pass {tuple(weight.shape[:1])}, one number per class"
        )
    if not cast:
        check_same_dtype("weight", weight, x)
        check_same_dtype("bias", bias, x)
    if not isinstance(target, Tensor) or target.dtype not in INDEX_DTYPES:
        kind = f"has dtype {target.dtype}" if isinstance(target, Tensor) else f"is a {type(target).__name__}"
        raise ArgumentTypeError(f"target {kind}: pass a torch.Tensor of class indices (int64)")
    if target.device != x.device:
        raise OnelaunchError(f"target is on {target.device} and x on {x.device}: move one, as in target.to(x.device)")
    if target.shape != x.shape[:-1]:
        raise OnelaunchError(
            f"target has shape {tuple(target.shape)}, which does not fit x {tuple(x.shape)}: pass {tuple(x.shape[:-1])}"
        )


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), target)` in chunks of rows, without storing the logits.

    x: `[..., features]`; weight: `[classes, features]`; target: class indices `[...]`. The loss is float32 (float64 for
    float64). reduction="none" stores the logits.
    """
    check_loss_options(label_smoothing, ignore_index, reduction)
    dtype = autocast_dtype(x.device) if isinstance(x, Tensor) and x.dtype != torch.float64 else None
    _check(x, weight, bias, target, cast=dtype is not None)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows, labels = x.unsqueeze(0).flatten(0, -2), target.reshape(-1).to(torch.int64)
    if reduction == "none" or inside_transform():
        smoothing, logits = label_smoothing, F.linear(rows, weight, bias)
        loss = cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=ignore_index, reduction=reduction)
        return widen(loss).reshape(target.shape if reduction == "none" else ())
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    options = (float(label_smoothing), int(ignore_index), reduction)
    return linear_cross_entropy_op(rows.contiguous(), weight, bias, labels, *options, gradient)[0]
