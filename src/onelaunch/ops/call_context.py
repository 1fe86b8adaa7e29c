"""In what surroundings an op is called: eager or traced, with gradients or without, under autocast, inside a transform."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from onelaunch.ops.arguments import check_float

_level_of_functorch, _is_tracing = torch._C._functorch.maybe_current_level, torch._C._is_tracing  # looked up once
any_autocast = torch._C._is_any_autocast_enabled


def _ordinary(x: torch.Tensor) -> bool:
    """No compiler, no dispatch mode, no subclass (and not `transformed`, asked before)."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
    )


def is_eager_cuda(x: torch.Tensor) -> bool:
    """A CUDA tensor in ordinary eager mode: an op calls its autograd function at once; going through the dispatcher's Python
    layers costs three times as much."""
    return x.is_cuda and _ordinary(x)


def is_eager_cpu(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """CPU tensors in ordinary eager mode, of one dtype or with fp32 beside a half: where nothing is dropped, PyTorch's own
    functions do what an op does, and take a fraction of its time."""
    if not x.is_cpu or not all(one is None or _ordinary(one) for one in (x, *others)):
        return False
    beside = {one.dtype for one in others if one is not None}
    alike = beside <= {x.dtype} or (x.dtype.itemsize == 2 and beside == {torch.float32})
    return alike and x.numel() > 0  # asked last: a compiler would take the answer for a condition


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def saves_through_hooks() -> bool:
    """Whether someone else keeps what is saved for a backward, as activation checkpointing and `save_on_cpu` do."""
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its unwrapping of dead `torch.func` tensors, of which `plain_eager` has seen there are none."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype `torch.autocast` asks for on this device, or None outside it."""
    if any_autocast() and device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def inside_transform() -> bool:
    """Inside a transform of `torch.func`, forward-mode differentiation, or `torch.jit.trace`.

    There the ops are compositions of PyTorch's own, which all of these know how to take; a custom op is opaque to them, and
    forward mode would drop its tangent without a word.
    """
    return forward_ad._current_level >= 0 or _level_of_functorch() is not None or _is_tracing()


inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo guards the two levels itself


def batched(gradient: torch.Tensor) -> bool:
    """Of several gradients at once (`is_grads_batched`), which only PyTorch's ops can take: it lies nowhere by itself."""
    return inside_transform() or not torch._C._has_storage(gradient)


def differentiable_backward(gradient: torch.Tensor) -> bool:
    """Whether a backward must be made of ops that can themselves be differentiated or transformed."""
    return torch.is_grad_enabled() or batched(gradient)


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


def dispatch_override(function: Any, argument: str, x: object, *others: Any, **options: Any) -> Any:
    """A call whose x is no tensor: the node that `torch.fx` makes of it where x is one of its proxies, else an error."""
    if not has_torch_function_unary(x):
        check_float(argument, x)
    return handle_torch_function(function, (x,), x, *others, **options)
