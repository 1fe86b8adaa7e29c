"""PyTorch's own losses, where they mean one of ours: `nn.CrossEntropyLoss()` is "cross_entropy", which every engine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.errors import OnelaunchError
from onelaunch.wrong_inputs import require_no_class

FUNCTIONS: dict[Callable[..., Any], str] = {
    F.cross_entropy: "cross_entropy",
    F.mse_loss: "mse",
    F.binary_cross_entropy_with_logits: "bce_with_logits",
}
MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.MSELoss: "mse",
    nn.BCEWithLogitsLoss: "bce_with_logits",
}


def with_named_loss(options: dict[str, Any], y: torch.Tensor) -> dict[str, Any]:
    """`options` with the name of the loss, if it is one of PyTorch's with settings that we have; else as they are.
    Raises OnelaunchError for a class, and for a loss with parameters of its own.

    y: the targets. Probabilities as targets of cross entropy are left to PyTorch.
    """
    loss = options.get("loss")
    require_no_class(loss)
    if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
        kind = type(loss).__name__
        raise OnelaunchError(f"loss={kind} has parameters, and only the model is trained: make them part of it")
    name = FUNCTIONS.get(loss) if isinstance(loss, type(F.mse_loss)) else MODULES.get(type(loss))  # type: ignore[arg-type]
    if name is None or (name == "cross_entropy" and y.is_floating_point() and y.dim() > 1):
        return options
    if isinstance(loss, nn.Module):
        plain = type(loss)()
        settings = {key: value for key, value in vars(loss).items() if not key.startswith("_") and key != "training"}
        smoothing = settings.pop("label_smoothing", 0.0)
        if any(value != getattr(plain, key) for key, value in settings.items()) or any(
            buffer is not None for buffer in loss._buffers.values()
        ):
            return options  # weights, another reduction or an ignored class
        options = {**options, "label_smoothing": smoothing} if smoothing else options
    return {**options, "loss": name}
