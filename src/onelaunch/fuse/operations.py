"""Which operation a call is: the functions, methods and modules of torch that level 1 has kernels for.

The same tables read a traced graph (arguments are nodes) and a running program (arguments are tensors).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.fuse.spelled import spelled_activation


@dataclass(frozen=True)
class Operation:
    role: str  # "linear" "batch_norm" "activation" "dropout" "log_softmax" "nll_loss" "cross_entropy"
    name: str  # an activation's name, else the role
    arguments: dict[str, Any] = field(default_factory=dict)  # of a function, by parameter; of a module, its inputs
    module: nn.Module | None = None
    path: str = ""  # of the module
    blocked: str | None = None  # why nothing may be fused over it, though its kind could be
    spelled: bool = False  # an activation that its module writes out in elementary operations

    @property
    def input(self) -> Any:
        return self.arguments.get("input")

    @property
    def inplace(self) -> bool:
        return bool(self.arguments.get("inplace")) or bool(getattr(self.module, "inplace", False))

    def option(self, name: str, default: Any = None) -> Any:
        """A module's attribute or a function's argument."""
        return getattr(self.module, name) if self.module is not None else self.arguments.get(name, default)

    @property
    def dropped(self) -> float:
        """The probability with which this dropout drops, as it stands: 0 in evaluation."""
        training = self.option("training", True)
        return float(self.option("p", 0.5)) if training is True else 0.0


ROLES = ("linear", "batch_norm", "dropout", "log_softmax", "nll_loss", "cross_entropy")
_UNARY = ("input",)
_INPLACE = ("input", "inplace")
_DROPOUT = ("input", "p", "training", "inplace")
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_LEAKY = ("input", "negative_slope", "inplace")

# function -> (name, its parameters in order)
FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.linear: ("linear", ("input", "weight", "bias")),
    F.batch_norm: ("batch_norm", _NORM),
    F.relu: ("relu", _INPLACE),
    torch.relu: ("relu", _UNARY),
    F.relu_: ("relu_", _UNARY),
    torch.relu_: ("relu_", _UNARY),
    F.leaky_relu: ("leaky_relu", _LEAKY),
    F.sigmoid: ("sigmoid", _UNARY),
    torch.sigmoid: ("sigmoid", _UNARY),
    F.tanh: ("tanh", _UNARY),
    torch.tanh: ("tanh", _UNARY),
    F.gelu: ("gelu", ("input", "approximate")),
    F.silu: ("silu", _INPLACE),
    F.dropout: ("dropout", _DROPOUT),
    torch.dropout: ("dropout", ("input", "p", "training")),
    F.log_softmax: ("log_softmax", ("input", "dim", "_stacklevel", "dtype")),
    torch.log_softmax: ("log_softmax", ("input", "dim", "dtype")),
    F.nll_loss: ("nll_loss", _LOSS[:-1]),
    F.cross_entropy: ("cross_entropy", _LOSS),
}
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (name, _UNARY) for name in ("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_")
} | {"log_softmax": ("log_softmax", ("input", "dim", "dtype"))}
FUNCTIONS |= {getattr(torch.Tensor, name): found for name, found in METHODS.items()}

MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Dropout: "dropout",
    nn.LogSoftmax: "log_softmax",
    nn.NLLLoss: "nll_loss",
    nn.CrossEntropyLoss: "cross_entropy",
}


def _finished(
    name: str, arguments: dict[str, Any], module: nn.Module | None, path: str, blocked: str | None
) -> Operation:
    if name.endswith("_"):
        name = name[:-1]
        arguments = {**arguments, "inplace": True}
    operation = Operation(name if name in ROLES else "activation", name, arguments, module, path, blocked)
    if name == "gelu" and operation.option("approximate", "none") == "tanh":
        operation = Operation("activation", "gelu_tanh", arguments, module, path, blocked)
    if name == "leaky_relu" and operation.option("negative_slope", 0.01) != 0.01 and not blocked:
        slope = operation.option("negative_slope")
        reason = f"leaky_relu has a slope of {slope}: there is a kernel for 0.01 only"
        operation = Operation("activation", name, arguments, module, path, reason)
    return operation


def of_call(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Operation | None:
    """The operation a function or method performs; None when level 1 has nothing to do with it."""
    found = METHODS.get(function) if isinstance(function, str) else FUNCTIONS.get(function)
    if found is None:
        return None
    name, parameters = found
    if "train" in keywords:  # torch.dropout's name for it
        keywords = {"training" if key == "train" else key: value for key, value in keywords.items()}
    if len(arguments) > len(parameters) or not set(keywords) <= set(parameters):
        return None
    return _finished(name, {**dict(zip(parameters, arguments, strict=False)), **keywords}, None, "", None)


def of_module(module: nn.Module, path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Operation | None:
    """The operation a module performs; one of a subclass of a known module is blocked, since it may do anything."""
    kind = known_base(module)
    if kind is None:
        name = spelled_activation(module)
        if name is None or len(arguments) + len(keywords) != 1:
            return None
        given = {"input": next(iter((*arguments, *keywords.values())))}
        watched = f"{path} has a hook" if hooked(module) else None
        return Operation("activation", name, given, module, path, watched, spelled=True)
    inputs = dict(zip(("input", "target"), arguments, strict=False)) | keywords
    blocked = None
    if type(module) is not kind:
        fused_by_hand = type(module).__module__.startswith("onelaunch.")
        blocked = (
            f"{path} is fused by hand already ({type(module).__name__})"
            if fused_by_hand
            else f"{path} is a {type(module).__name__}, a subclass of nn.{kind.__name__}"
        )
    elif hooked(module):
        blocked = f"{path} has a hook"
    elif "forward" in vars(module):
        blocked = f"{path} has a forward of its own"
    return _finished(MODULES[kind], inputs, module, path, blocked)


def is_known(module: nn.Module) -> bool:
    return known_base(module) is not None or spelled_activation(module) is not None


def known_base(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in type(module).__mro__ if kind in MODULES), None)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def hooked(module: nn.Module) -> bool:
    return any(hooks_of(module))
