"""Losses and accuracy in plain PyTorch, which every engine must reproduce."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onelaunch.run.options import CUSTOM_LOSS
from onelaunch.run.spec import Spec


def loss_of(
    spec: Spec, output: torch.Tensor, target: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean loss of a batch: over rows for cross_entropy, over all elements for the others.

    With the rows' `weights` it is the weighted mean of the rows' losses, sum(w * l) / sum(w); zero where all weights are zero.
    """
    reduction = "mean" if weights is None else "none"
    match spec.loss:
        case "cross_entropy":
            loss = F.cross_entropy(output, target, label_smoothing=spec.label_smoothing, reduction=reduction)
        case "mse":
            loss = F.mse_loss(output, target, reduction=reduction)
        case "bce_with_logits":
            loss = F.binary_cross_entropy_with_logits(output, target, reduction=reduction)
        case _:
            raise AssertionError(spec.loss)
    if weights is None:
        return loss
    each = loss if loss.ndim == 1 else loss.flatten(1).mean(dim=1)
    return (each * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def count_correct(spec: Spec, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The number of correct predictions in a batch, or None without an accuracy: rows whose largest output is the class,
    or, for bce_with_logits, outputs that are above 0 exactly if the target is above 0.5."""
    match spec.loss:
        case "cross_entropy":
            return (output.argmax(dim=1) == target).sum()
        case "bce_with_logits":
            return ((output > 0) == (target > 0.5)).sum()
    return None


def predictions_per_row(spec: Spec, outputs: int) -> int:
    """Predictions per row: what a row adds to the denominator of the accuracy."""
    return outputs if spec.loss == "bce_with_logits" else 1


def values_per_row(spec: Spec, outputs: int) -> int:
    """Loss values per row: what a row adds to the denominator of the mean loss."""
    return 1 if spec.loss in ("cross_entropy", CUSTOM_LOSS) else outputs


def has_accuracy(spec: Spec) -> bool:
    """Whether a prediction can be correct or wrong, which has no meaning for mse or a function of the user's."""
    return spec.loss not in ("mse", CUSTOM_LOSS)


def as_features(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A batch as the model's input: uint8 becomes value / 255 in `dtype`, other integers stay as they are."""
    if x.dtype == torch.uint8:
        return x.to(dtype) / 255
    return x.to(dtype) if x.is_floating_point() else x


def own_features(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`as_features` in memory of its own: a model may change its input in place, and x may be the caller's array."""
    found = as_features(x, dtype)
    return found.clone() if found is x else found
