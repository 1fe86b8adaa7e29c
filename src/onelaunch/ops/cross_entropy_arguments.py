"""Argument checks of cross_entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer, require_option
from onelaunch.ops.arguments import check_float, check_number

REDUCTIONS = ("mean", "sum", "none")


def check_loss_options(label_smoothing: float, ignore_index: int, reduction: str) -> None:
    require_option("reduction", reduction, REDUCTIONS)
    if not 0 <= check_number("label_smoothing", label_smoothing, "a number from 0 to 1") <= 1:
        raise OnelaunchError(f"label_smoothing={label_smoothing} is out of range: pass a number from 0 to 1")
    if not -(2**63) <= require_integer("ignore_index", ignore_index, "a class, or a number no class has") < 2**63:
        raise OnelaunchError(
            f"ignore_index={abbreviate(ignore_index)} is out of range: pass a class, or a number no class has"
        )


def check_tensors(logits: Tensor, target: Tensor) -> None:
    check_float("logits", logits)
    if not isinstance(target, Tensor):
        raise ArgumentTypeError(f"target is a {type(target).__name__}: pass a torch.Tensor of class indices")
    if target.device != logits.device:
        raise OnelaunchError(
            f"target is on {target.device} and logits on {logits.device}: move one, as in target.to(logits.device)"
        )
    indices = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else logits.shape[:0]
    if target.dtype.is_floating_point:
        if target.shape != logits.shape:
            remedy = "target.long(), if it holds classes" if target.shape == indices else "equal shapes"
            raise OnelaunchError(
                f"target of {target.dtype} (probabilities) has shape {tuple(target.shape)} and logits {tuple(logits.shape)}: "
                f"pass {remedy}"
            )
        return
    if target.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8):
        raise ArgumentTypeError(f"target has dtype {target.dtype}: pass class indices (int64) or probabilities (float)")
    if logits.dim() == 0:
        raise OnelaunchError("logits has no dimension: pass [classes], [batch, classes] or [batch, classes, ...]")
    if target.shape != indices:
        remedy = f"pass {tuple(indices)}"
        if target.shape == logits.shape:
            remedy += ", as target.argmax(1) of one-hot rows"
        elif target.shape == logits.shape[:-1]:
            remedy += ", or classes in dimension 1 of logits, as logits.movedim(-1, 1)"
        raise OnelaunchError(
            f"target has shape {tuple(target.shape)}, which does not fit logits {tuple(logits.shape)}: {remedy}"
        )
