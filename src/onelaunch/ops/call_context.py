"""The context of an op's call: eager or traced, with gradients or without, under autocast, inside a transform."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from onelaunch.ops.arguments import check_float

_level_of_functorch, _is_tracing = (
    torch._C._functorch.maybe_current_level,
    torch._C._is_tracing,
)  # looked up once, for speed
any_autocast = torch._C._is_any_autocast_enabled


def is_traced(x: torch.Tensor) -> bool:
    """Whether x stands for a tensor that compiled code will have; also true of a user's subclass."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter)


def _ordinary(x: torch.Tensor) -> bool:
    """Whether no compiler, dispatch mode or subclass is involved. The caller has checked `inside_transform` before."""
    return (
        not is_traced(x)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
    )


def is_eager_cuda(x: torch.Tensor) -> bool:
    """Whether x is a CUDA tensor in ordinary eager mode.

    An op then calls its autograd function directly; going through the dispatcher's Python layers takes three times as long.
    """
    return x.is_cuda and _ordinary(x)


def is_eager_cpu(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether these are CPU tensors in ordinary eager mode, of one dtype, or 16-bit x and otherwise float32.

    Without dropout, PyTorch's own functions then compute the same as an op, in a fraction of its time.
    """
    if not x.is_cpu or not all(one is None or _ordinary(one) for one in (x, *others)):
        return False
    dtypes = {one.dtype for one in others if one is not None}
    alike = dtypes <= {x.dtype} or (x.dtype.itemsize == 2 and dtypes == {torch.float32})
    return alike and x.numel() > 0  # last, because a compiler would add a guard on the answer


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def saves_through_hooks() -> bool:
    """Whether hooks keep the tensors saved for backward, as activation checkpointing and `save_on_cpu` do."""
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without unwrapping dead `torch.func` tensors: `is_eager_cuda` has excluded them."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of `torch.autocast` on this device, or None outside it."""
    if any_autocast() and device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def inside_transform() -> bool:
    """Whether the call is inside a transform of `torch.func`, forward-mode differentiation, or `torch.jit.trace`.

    The ops then run as compositions of PyTorch's own ops, which all of these support. A custom op is opaque to them, and
    forward mode would silently drop its tangent.
    """
    return forward_ad._current_level >= 0 or _level_of_functorch() is not None or _is_tracing()


inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo guards the two levels itself


def batched(gradient: torch.Tensor) -> bool:
    """Whether this stands for several gradients at once (`is_grads_batched`): it has no storage, only PyTorch's ops take it."""
    return inside_transform() or not torch._C._has_storage(gradient)


def differentiable_backward(gradient: torch.Tensor) -> bool:
    """Whether a backward pass must consist of ops that can themselves be differentiated or transformed."""
    return torch.is_grad_enabled() or batched(gradient)


@functools.cache
def keep_random_calls_separate() -> None:
    """Keep torch.compile from merging two equal calls of an op with dropout, by adding the ops to its list of random ops.

    The ops' fake implementations call this, that is, before there is a graph to merge calls in.
    """
    from torch._functorch import compile_utils

    compile_utils.rand_ops += [
        torch.ops.onelaunch.relu_dropout,
        torch.ops.onelaunch.linear,
        torch.ops.onelaunch.batch_norm,
        torch.ops.onelaunch.norm,
    ]


def dispatch_override(function: Any, argument: str, x: object, *others: Any, **options: Any) -> Any:
    """The result for an x that is not a tensor: a `torch.fx` node if x is a proxy, else an error."""
    if not has_torch_function_unary(x):
        check_float(argument, x)
    return handle_torch_function(function, (x,), x, *others, **options)
