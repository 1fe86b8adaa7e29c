"""The dropouts of a model that draw the masks of `onelaunch.rng`: its modules, and the calls of PyTorch's functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch import nn as fused

DROPOUTS = frozenset({F.dropout, torch.dropout})


def dropout_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that draw the masks of `onelaunch.rng`; a module's position is its number there.

    They are the `nn.Dropout` modules and those of `ol.nn` with a dropout. A module whose forward was replaced is left out.
    """
    return [module for module in model.modules() if _drops(module) and "forward" not in vars(module)]


def _drops(module: nn.Module) -> bool:
    if type(module) in (fused.Linear, fused.BatchNorm1d, fused.BatchNorm2d, fused.BatchNorm3d):
        return bool(module.dropout)
    return type(module) in (nn.Dropout, fused.ReLUDropout)


def dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> tuple[Tensor, float, bool]:
    """(x, p, whether it drops) of a call of `F.dropout` or `torch.dropout`."""
    return input, float(p), training and train
