"""What every op asks of its arguments, and whether it may skip PyTorch's dispatcher."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_option

ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 takes the reference, on any device


def check_probability(argument: str, p: object) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise ArgumentTypeError(f"{argument}={p!r} is not a number: pass a probability from 0 to 1")
    if not 0 <= p <= 1:
        raise OnelaunchError(f"{argument}={p} is not a probability: pass a number from 0 to 1")
    return float(p)


def check_activation(activation: object) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        require_option("activation", activation, ("None", *ACTIVATIONS))


def check_float(argument: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{argument} is a {type(tensor).__name__}: pass a torch.Tensor")
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise ArgumentTypeError(f"{argument} has dtype {tensor.dtype}: pass float32, float16, bfloat16 or float64")


def check_beside(argument: str, tensor: torch.Tensor | None, name: str, other: torch.Tensor) -> None:
    """`tensor` must be a floating-point tensor on the device of `other`."""
    if tensor is None:
        return
    check_float(argument, tensor)
    if tensor.device != other.device:
        raise OnelaunchError(
            f"{argument} is on {tensor.device} and {name} on {other.device}: move one, as in {argument}.to({name}.device)"
        )


def plain_eager(x: torch.Tensor) -> bool:
    """A CUDA tensor in ordinary eager mode: no compiler, no `torch.func` transform, no dispatch mode, no subclass.

    Then an op calls its autograd function at once; going through the dispatcher's Python layers costs three times as much.
    """
    return (
        x.is_cuda
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
    )


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its unwrapping of dead `torch.func` tensors, of which `plain_eager` has seen there are none."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


@functools.cache
def kernels(name: str) -> Any:
    """The module `onelaunch.kernels.<name>`; the first call imports Triton. An import statement would cost each call."""
    return importlib.import_module(f"onelaunch.kernels.{name}")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype `torch.autocast` asks for on this device, or None outside it."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def refuse_forward_mode(name: str, *tensors: torch.Tensor | None) -> None:
    """A tangent would be lost without a word: PyTorch looks at custom ops in reverse mode only."""
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise OnelaunchError(
            f"onelaunch.{name} has no forward-mode derivative: use reverse mode, or the torch.nn.functional ops"
        )


def refuse_vmap(name: str) -> NoReturn:
    raise OnelaunchError(
        f"onelaunch.{name} has no torch.func.vmap rule: call it on the batched tensor, or use the torch.nn.functional ops"
    )
