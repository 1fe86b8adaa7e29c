"""The weight of each training row in its batch's mean loss, from `class_weight` and `sample_weight`."""

from __future__ import annotations

import math
from typing import Any

import torch

from onelaunch.errors import OnelaunchError, abbreviate_list
from onelaunch.run.spec import Spec
from onelaunch.train.labels import Names

USUAL_EXPONENT = 20  # of the largest weight, to the base 2


def row_weights_of(
    spec: Spec, y: torch.Tensor, outputs: int, names: Names | None, sample_weight: torch.Tensor | None,
    train_rows: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """float32, one per row of y and on y's device: the class's weight times the sample's; None if neither is given.

    y, train_rows: as in Run; only training rows count for "balanced". Raises OnelaunchError if a weight does not fit the data.
    """
    weights = None if sample_weight is None else _sample_weights(sample_weight, y)
    if spec.class_weight is not None:
        by_class = _class_weights(spec, y if train_rows is None else y[train_rows], outputs, names)
        of_rows = by_class[y.flatten().to(torch.int64)]
        weights = of_rows if weights is None else weights * of_rows
    if weights is not None and not float(weights.sum(dtype=torch.float64)) > 0:
        raise OnelaunchError("class_weight and sample_weight leave no training row with a weight above 0")
    return None if weights is None else _of_usual_size(weights)


def _of_usual_size(weights: torch.Tensor) -> torch.Tensor:
    """The weights times a power of two, exactly, where products with losses would leave float32's range: a mean does not
    depend on their scale."""
    exponent = math.frexp(float(weights.max()))[1]
    return weights if abs(exponent) <= USUAL_EXPONENT else (weights.double() * 2.0**-exponent).float()


def _sample_weights(weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 2 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.ndim != 1 or len(weight) != len(y):
        raise OnelaunchError(f"sample_weight has shape {list(weight.shape)}: pass one weight per row, {len(y)} in all")
    weight = weight.to(y.device, torch.float32)
    bad = ~(torch.isfinite(weight) & (weight >= 0))
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise OnelaunchError(f"sample_weight[{row}]={float(weight[row])} must be a finite number, 0 or more")
    return weight.contiguous()


def _class_weights(spec: Spec, y: torch.Tensor, outputs: int, names: Names | None) -> torch.Tensor:
    """float32, one per class, by the class's number."""
    if spec.loss == "bce_with_logits":
        if outputs != 1 or not ((y == 0) | (y == 1)).all():
            raise OnelaunchError(
                "class_weight with loss='bce_with_logits' needs one output and targets 0 or 1: pass sample_weight instead"
            )
        outputs = 2
    labels: list[Any] = [*names, *range(len(names), outputs)] if names else list(range(outputs))
    if spec.class_weight == "balanced":  # as scikit-learn's: rows / (classes that occur * rows of the class)
        counts = torch.bincount(y.flatten().to(torch.int64), minlength=outputs).double()
        balanced = len(y) / ((counts > 0).sum() * counts)
        return torch.where(counts > 0, balanced, 0.0).float()
    if isinstance(spec.class_weight, tuple):
        if names:
            example = f"{{{labels[0]!r}: {spec.class_weight[0]:g}}}"
            raise OnelaunchError(f"class_weight is a list, but y has class names: pass a dict such as {example}")
        if len(spec.class_weight) != outputs:
            raise OnelaunchError(
                f"class_weight has length {len(spec.class_weight)} for {outputs} classes: pass one weight per class, or a dict"
            )
        return torch.tensor(spec.class_weight, dtype=torch.float32, device=y.device)
    assert isinstance(spec.class_weight, dict)
    given = {str(label): weight for label, weight in spec.class_weight.items()}
    if unknown := [label for label in given if label not in map(str, labels)]:
        known = abbreviate_list([repr(label) for label in labels])
        raise OnelaunchError(f"class_weight names {unknown[0]!r}, which is not a class here: the classes are {known}")
    return torch.tensor([given.get(str(label), 1.0) for label in labels], dtype=torch.float32, device=y.device)
