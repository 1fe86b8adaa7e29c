"""Cross-entropy in PyTorch ops (the CPU path), and its gradient in ops that can be differentiated again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.errors import OnelaunchError


def cross_entropy_reference(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str
) -> Tensor:
    return F.cross_entropy(
        logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
    )


def checked_reference(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    """The same, with an `OnelaunchError` for a target that is out of range."""
    try:
        return cross_entropy_reference(logits, target, *options)
    except IndexError as error:
        classes, ignore_index = logits.shape[min(1, logits.dim() - 1)], options[1]
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))][0]
        remedy = f"pass 0 to {classes - 1}" if classes else "pass logits of one class or more"
        remedy += f", or ignore_index={wrong}" if wrong < 0 else ""
        raise OnelaunchError(f"target holds {wrong}, out of range for logits of {classes} classes: {remedy}") from error


def empty_outputs(logits: Tensor, reduction: str, fp32_loss: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (loss, log-sum-exp per row in two parts: the largest logit and the rest, number of rows that are not ignored)."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (logits.shape[0],) if reduction == "none" else ()
    loss = logits.new_empty(shape, dtype=exact if fp32_loss else logits.dtype)
    return loss, logits.new_empty((logits.shape[0], 2), dtype=exact), logits.new_empty((), dtype=exact)


def forward_reference(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str, fp32_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse, count = empty_outputs(logits, reduction, fp32_loss)
    exact = logits.to(lse.dtype)
    loss.copy_(checked_reference(exact, target, label_smoothing, ignore_index, reduction))
    lse.zero_()  # the kernels' backward pass reads it, the reference does not
    count.copy_((target != ignore_index).sum())
    return loss, lse, count


def differentiable_backward_reference(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, label_smoothing: float, ignore_index: int,
    reduction: str,
) -> Tensor:  # fmt: skip
    """The gradient in ops that can be differentiated again; it therefore does not use the values of `lse`."""
    counts = target != ignore_index
    expected = torch.full_like(logits, label_smoothing / logits.shape[1], dtype=lse.dtype)
    expected.scatter_add_(1, torch.where(counts, target, 0)[:, None], torch.full_like(lse[:, :1], 1 - label_smoothing))
    upstream = dloss.to(lse.dtype)
    if reduction == "mean":
        upstream = upstream / count.clamp_min(1)  # with all rows ignored: 0, not 0 / 0, which is differentiated too
    gradient = (torch.softmax(logits.to(lse.dtype), 1) - expected) * upstream.reshape(-1, 1)
    return torch.where(counts[:, None], gradient, 0).to(logits.dtype)


def backward_reference(dloss: Tensor, logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
    return differentiable_backward_reference(dloss, logits, target, *rest).contiguous()
