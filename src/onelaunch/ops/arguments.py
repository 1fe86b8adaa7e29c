"""What every op asks of its arguments, and whether it may skip PyTorch's dispatcher."""

from __future__ import annotations

import functools
import importlib
import numbers
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_option

ACTIVATIONS = ("relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 takes the reference, on any device

_level_of_functorch, _is_tracing = torch._C._functorch.maybe_current_level, torch._C._is_tracing  # looked up once


def check_number(argument: str, value: object, wanted: str) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise ArgumentTypeError(f"{argument}={value!r} is not a number: pass {wanted}")
    return float(value)


def check_probability(argument: str, p: object) -> float:
    number = check_number(argument, p, "a probability from 0 to 1")
    if not 0 <= number <= 1:
        raise OnelaunchError(f"{argument}={p} is not a probability: pass a number from 0 to 1")
    return number


def check_activation(activation: object) -> None:
    if activation is not None:
        require_option("activation", activation, ACTIVATIONS, or_else="None for none")


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
    """A CUDA tensor in ordinary eager mode: no compiler, no dispatch mode, no subclass (and not `transformed`, asked before).

    Then an op calls its autograd function at once; going through the dispatcher's Python layers costs three times as much.
    """
    return (
        x.is_cuda
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
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
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def transformed() -> bool:
    """Inside a transform of `torch.func`, forward-mode differentiation, or `torch.jit.trace`.

    There the ops are compositions of PyTorch's own, which all of these know how to take; a custom op is opaque to them, and
    forward mode would drop its tangent without a word.
    """
    return forward_ad._current_level >= 0 or _level_of_functorch() is not None or _is_tracing()


transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo guards the two levels itself


def differentiable_backward() -> bool:
    """Whether a backward must be made of ops that can themselves be differentiated or transformed."""
    return torch.is_grad_enabled() or transformed()


@functools.cache
def keep_random_calls_apart() -> None:
    """Two calls of an op that draws must draw twice; torch.compile merges equal ones, but for those in a list of its own.

    Called by what is traced of each (its fake), that is before there is a graph to merge calls in.
    """
    from torch._functorch import compile_utils

    compile_utils.rand_ops += [
        torch.ops.onelaunch.relu_dropout,
        torch.ops.onelaunch.linear,
        torch.ops.onelaunch.batch_norm,
    ]


def overridden(function: Any, argument: str, x: object, *others: Any, **options: Any) -> Any:
    """A call whose x is no tensor: the node that `torch.fx` makes of it where x is one of its proxies, else an error."""
    if not has_torch_function_unary(x):
        check_float(argument, x)
    return handle_torch_function(function, (x,), x, *others, **options)
