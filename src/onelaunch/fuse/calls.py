"""What a rewritten graph calls in place of a chain: the ops of level 1, and the folding of a batch norm into a linear layer."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch import ops
from onelaunch.ops.activations import activate
from onelaunch.ops.arguments import wants_gradient

# The kernels are for CUDA. Elsewhere the chain runs as plain PyTorch, which is faster there than the ops' reference; tests that
# want to see the ops themselves on a CPU switch this off.
plain_elsewhere = True
_SERVED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _plain(x: Tensor) -> bool:
    """Whether the ops cannot serve x, or not as exactly: then PyTorch's own operations do what the chain says."""
    if not isinstance(x, Tensor) or x.dtype not in _SERVED or x.layout is not torch.strided:
        return True
    if not x.is_cuda and (plain_elsewhere or x.device.type != "cpu"):
        return True
    return not torch.compiler.is_compiling() and _transformed(x)


def _transformed(x: Tensor) -> bool:
    """Inside vmap, grad or jvp of `torch.func`, or a tensor of a subclass (DTensor, a nested tensor)."""
    return type(x) not in (Tensor, nn.Parameter) or torch._C._functorch.maybe_current_level() is not None


def _finished(z: Tensor, activation: str | None, dropout: float) -> Tensor:
    y = activate(z, activation)
    return F.dropout(y, dropout) if dropout else y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dropout: float) -> Tensor:
    if _plain(x):
        return _finished(F.linear(x, weight, bias), activation, dropout)
    return ops.linear(x, weight, bias, activation=activation, dropout=dropout)


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    return _finished(x, "relu", dropout) if _plain(x) else ops.relu_dropout(x, dropout)


def batch_norm(x: Tensor, norm: Any, activation: str | None, dropout: float) -> Tensor:
    """What the module `norm` does in its mode, then activation and dropout."""
    if _plain(x):
        return _finished(norm.forward(x), activation, dropout)
    norm._check_input_dim(x)
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1 / float(norm.num_batches_tracked)
    moved = not norm.training or norm.track_running_stats
    return ops.batch_norm(
        x,
        norm.running_mean if moved else None,
        norm.running_var if moved else None,
        norm.weight,
        norm.bias,
        training=norm.training or norm.running_mean is None,
        momentum=momentum,
        eps=norm.eps,
        activation=activation,
        dropout=dropout,
    )


def batch_norm_with(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float, activation: str | None, dropout: float,
) -> Tensor:  # fmt: skip
    """`F.batch_norm`, then activation and dropout."""
    if _plain(x):
        z = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        return _finished(z, activation, dropout)
    return ops.batch_norm(
        x, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps,
        activation=activation, dropout=dropout,
    )  # fmt: skip


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, reduction: str) -> Tensor:
    function = F.cross_entropy if _plain(logits) else ops.cross_entropy
    return function(logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction)


def nll_of_log_softmax(logits: Tensor, target: Tensor, dim: int, ignore_index: int, reduction: str) -> Tensor:
    """`F.nll_loss(F.log_softmax(logits, dim), target)`; one kernel where `dim` is the classes'."""
    if dim % logits.dim() != min(1, logits.dim() - 1):
        return F.nll_loss(F.log_softmax(logits, dim), target, ignore_index=ignore_index, reduction=reduction)
    return cross_entropy(logits, target, 0.0, ignore_index, reduction)


class _Folded(NamedTuple):
    made_from: tuple[Any, ...]
    weight: Tensor
    bias: Tensor


_folded: weakref.WeakKeyDictionary[nn.Module, _Folded] = weakref.WeakKeyDictionary()


def folded_linear(x: Tensor, layer: nn.Linear, norm: nn.BatchNorm1d, activation: str | None) -> Tensor:
    """`act(norm(layer(x)))` in evaluation, with the batch norm folded into the layer's weights.

    The folded weights are kept, and made again in the same memory (a captured CUDA graph may read it) when a tensor they come
    from is another one or has been written to. Where something is differentiated, compiled or exported the norm stays apart.
    """
    tensors = (layer.weight, layer.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    seen_whole = not torch.compiler.is_compiling() and not _transformed(x) and torch._C._len_torch_dispatch_stack() == 0
    if x.dim() != 2 or not seen_whole or wants_gradient(x, *tensors) or any(_unversioned(t) for t in tensors):
        return batch_norm(F.linear(x, layer.weight, layer.bias), norm, activation, 0.0)
    made_from = (norm, norm.eps, *((id(t), t.data_ptr(), t._version) for t in tensors if t is not None))
    known = _folded.get(layer)
    if known is None or known.made_from != made_from:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # what is captured has not run yet
            return batch_norm(F.linear(x, layer.weight, layer.bias), norm, activation, 0.0)
        known = _Folded(made_from, *_fold(layer, norm, known))
        _folded[layer] = known
    return linear(x, known.weight, known.bias, activation, 0.0)


def _fold(layer: nn.Linear, norm: nn.BatchNorm1d, known: _Folded | None) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.inference_mode(False), torch.no_grad():
        exact = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
        scale = (norm.running_var.to(exact) + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight
        bias = -norm.running_mean.to(exact) if layer.bias is None else layer.bias - norm.running_mean.to(exact)
        bias = bias * scale
        if norm.bias is not None:
            bias = bias + norm.bias
        dtype = layer.weight.dtype
        folded = (layer.weight * scale[:, None]).to(dtype), bias.to(dtype)
        if known is None or (known.weight.shape, known.weight.dtype, known.weight.device) != (
            layer.weight.shape, dtype, layer.weight.device,
        ):  # fmt: skip
            return folded
        return known.weight.copy_(folded[0]), known.bias.copy_(folded[1])


def _unversioned(tensor: Tensor | None) -> bool:
    """Made under inference_mode: nobody counts the writes to it."""
    return tensor is not None and tensor.is_inference()
