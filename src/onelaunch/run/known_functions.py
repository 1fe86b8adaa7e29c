"""The functions and modules of PyTorch that `Recorder` knows: a forward that uses only these is a chain of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch import nn as fused
from onelaunch.activations import ACTIVATIONS

# Questions about a tensor whose answers do not depend on its values.
QUERIES = frozenset({
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.__len__, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    torch.numel, torch.is_floating_point, Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.dtype.__get__,  # type: ignore[attr-defined]
})  # fmt: skip
DEVICE, IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]
RESHAPES = frozenset({Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape})
SAME_VALUES = frozenset({Tensor.float, Tensor.contiguous})
SUMS = frozenset({Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__})
SUMS_IN_PLACE = frozenset({Tensor.add_, Tensor.__iadd__})
# Functions as (module, names of the arguments after the input).
ACTIVATION_FUNCTIONS: Mapping[Callable[..., Any], tuple[type[nn.Module], tuple[str, ...]]] = {
    F.relu: (nn.ReLU, ("inplace",)), torch.relu: (nn.ReLU, ()), Tensor.relu: (nn.ReLU, ()),
    F.leaky_relu: (nn.LeakyReLU, ("negative_slope", "inplace")),
    torch.sigmoid: (nn.Sigmoid, ()), Tensor.sigmoid: (nn.Sigmoid, ()), F.sigmoid: (nn.Sigmoid, ()),
    torch.tanh: (nn.Tanh, ()), Tensor.tanh: (nn.Tanh, ()), F.tanh: (nn.Tanh, ()),
    F.gelu: (nn.GELU, ()), F.silu: (nn.SiLU, ("inplace",)),
    F.elu: (nn.ELU, ("alpha", "inplace")), F.selu: (nn.SELU, ("inplace",)), torch.selu: (nn.SELU, ()),
    F.mish: (nn.Mish, ("inplace",)), F.softplus: (nn.Softplus, ("beta", "threshold")),
    F.hardswish: (nn.Hardswish, ("inplace",)),
}  # fmt: skip
IN_PLACE: Mapping[Callable[..., Any], type[nn.Module]] = {
    torch.relu_: nn.ReLU, Tensor.relu_: nn.ReLU, torch.sigmoid_: nn.Sigmoid, Tensor.sigmoid_: nn.Sigmoid,
    torch.tanh_: nn.Tanh, Tensor.tanh_: nn.Tanh,
}  # fmt: skip
KNOWN_MODULES: frozenset[type[nn.Module]] = frozenset({
    nn.Linear, nn.Flatten, nn.Dropout, nn.BatchNorm1d, nn.LayerNorm, nn.Identity, fused.Linear, fused.BatchNorm1d,
    fused.LayerNorm, fused.ReLUDropout, *(entry.module for entry in ACTIVATIONS.values()),
})  # fmt: skip


def settings_remedy(module: nn.Module) -> str:
    """`" (alpha=2.0; the native engines take 1.0)"` for a known activation with other settings, else an empty string."""
    entries = [entry for entry in ACTIVATIONS.values() if type(module) is entry.module]
    for name, known in entries[0].settings.items() if entries else ():
        if getattr(module, name) != known:
            return f" ({name}={getattr(module, name)!r}; the native engines take {known!r})"
    return ""
