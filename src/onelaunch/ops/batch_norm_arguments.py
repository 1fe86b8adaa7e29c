"""Argument checks of batch norm."""

from __future__ import annotations

from torch import Tensor

from onelaunch.errors import OnelaunchError
from onelaunch.ops.arguments import check_beside, check_float, check_number


def check_numbers(eps: float, momentum: float, running_mean: Tensor | None, running_var: Tensor | None) -> None:
    if not check_number("eps", eps, "a small number, such as 1e-5") > 0:
        raise OnelaunchError(f"eps={eps!r} must be above 0: pass a small number, such as 1e-5")
    if momentum is None:
        raise OnelaunchError("momentum=None: pass a number; ol.nn.BatchNorm1d computes one from the number of batches")
    check_number("momentum", momentum, "a number, such as 0.1")
    if (running_mean is None) != (running_var is None):
        missing = "running_mean" if running_mean is None else "running_var"
        raise OnelaunchError(f"{missing}=None beside the other one: pass both running statistics, or neither")


def check_tensors(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool,
) -> None:  # fmt: skip
    check_float("x", x)
    shape = x.shape
    if len(shape) < 2:
        raise OnelaunchError(f"x has shape {tuple(shape)}: pass [batch, channels] or [batch, channels, ...]")
    named = (("running_mean", running_mean), ("running_var", running_var), ("weight", weight), ("bias", bias))
    for name, tensor in named:
        if tensor is not None:
            check_beside(name, tensor, "x", x)
            if tensor.shape != shape[1:2]:
                expected = f"{name} of shape {tuple(shape[1:2])}, one number per channel"
                other = f", or x of {len(tensor)} channels" if tensor.dim() == 1 else ""
                raise OnelaunchError(
                    f"{name} has shape {tuple(tensor.shape)} and x {tuple(shape)}: pass {expected}{other}"
                )
        elif not training and name.startswith("running"):
            raise OnelaunchError(f"{name}=None needs training=True: pass the running statistics to evaluate with")
    if training and x.numel() == shape[1] > 0:
        raise OnelaunchError(
            f"x has shape {tuple(shape)}, one value per channel: pass more rows, or training=False, which is a module's eval()"
        )
