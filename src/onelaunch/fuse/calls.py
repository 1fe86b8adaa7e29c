"""What a rewritten graph calls in place of a chain: the ops of level 1, and the folding of a batch norm into a linear layer."""

from __future__ import annotations

import operator
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from onelaunch import ops
from onelaunch.activations import activate
from onelaunch.ops.batch_norm import batch_norm_of
from onelaunch.ops.call_context import wants_gradient

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
    # Of what has no elements PyTorch asks less than the ops: a norm takes any number of channels then.
    return not torch.compiler.is_compiling() and (_transformed(x) or not x.numel())


def _transformed(x: Tensor) -> bool:
    """Inside vmap, grad or jvp of `torch.func`, in forward mode, or a tensor of a subclass (DTensor, a nested tensor)."""
    if type(x) not in (Tensor, nn.Parameter) or forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.maybe_current_level() is not None


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
    return batch_norm_of(norm, x, activation, dropout)


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
    """`F.nll_loss(F.log_softmax(logits, dim), target)`; one kernel where `dim` is the classes', and the target classes."""
    if target.is_floating_point() or dim % logits.dim() != min(1, logits.dim() - 1):
        return F.nll_loss(F.log_softmax(logits, dim), target, ignore_index=ignore_index, reduction=reduction)
    return cross_entropy(logits, target, 0.0, ignore_index, reduction)


_Tensors = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Folded:
    """The folded weights of a layer, and what they were made from.

    The tensors are held, so that none made later passes for one that died (`torch.utils.swap_tensors` refuses those with weak
    references). Their memory is not: it may go, as where `.data` is set, and its address come back with other weights in it.
    """

    norm: nn.Module
    eps: float
    tensors: _Tensors
    memory: list[tuple[Tensor, int, int, StorageWeakRef]]  # each tensor with its version, address and storage
    weight: Tensor
    bias: Tensor
    usable: bool
    fresh: bool = True  # until someone who may write without moving a version has had the weights
    ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = frozenset(map(id, self.tensors))

    def holds(self, norm: nn.Module, tensors: _Tensors) -> bool:
        if not self.fresh or self.norm is not norm or self.eps != norm.eps:
            return False
        if not all(map(operator.is_, self.tensors, tensors)):
            return False
        for tensor, version, address, storage in self.memory:
            if tensor.data_ptr() != address or tensor.untyped_storage()._cdata != storage.cdata:
                return False
            if tensor._version != version:
                return False
        return True


_folded: weakref.WeakKeyDictionary[nn.Module, _Folded] = weakref.WeakKeyDictionary()
_folding = threading.RLock()  # a step that ends while a fold is made finds it afterwards
_listening = False


def folded_linear(x: Tensor, layer: nn.Linear, norm: nn.BatchNorm1d, activation: str | None) -> Tensor:
    """`act(norm(layer(x)))` in evaluation, with the batch norm folded into the layer's weights.

    The folded weights are kept, and made again in the same memory (a captured CUDA graph may read it) when a tensor they come
    from is another one, has been written to, or may have been. Where something is differentiated, compiled or exported, or a
    write would go unseen, the norm stays apart.
    """
    known = _fold_for(x, layer, norm)
    if known is None:
        return batch_norm(F.linear(x, layer.weight, layer.bias), norm, activation, 0.0)
    return linear(x, known.weight, known.bias, activation, 0.0)


def _fold_for(x: Tensor, layer: nn.Linear, norm: nn.BatchNorm1d) -> _Folded | None:
    if torch.compiler.is_compiling() or x.dim() != 2 or _transformed(x):
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    parameters = (layer.weight, layer.bias, norm.weight, norm.bias)
    known = _folded.get(layer)
    if wants_gradient(x, *parameters):
        if known is not None and wants_gradient(*parameters):
            known.fresh = False  # what is trained is written, and not every optimizer says so
        return None
    # In training a norm moves its statistics without a word, but it counts the batches.
    tensors = (*parameters, norm.running_mean, norm.running_var, getattr(norm, "num_batches_tracked", None))
    if known is None or not known.holds(norm, tensors):
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # what is captured has not run yet
            return None
        with _folding:
            known = _folded.get(layer)
            if known is None or not known.holds(norm, tensors):
                known = _make(layer, norm, tensors, known)
    return known if known is not None and known.usable else None


def _make(layer: nn.Linear, norm: nn.BatchNorm1d, tensors: _Tensors, known: _Folded | None) -> _Folded | None:
    """None where the weights could be written without our seeing it."""
    present = [tensor for tensor in tensors if tensor is not None]
    complete = all(tensor is not None for tensor in tensors[4:])
    # What is no parameter was passed in by `functional_call`, as a rule for one call: a fold would cost more than it saves.
    at_home = all(tensor is None or type(tensor) is nn.Parameter for tensor in tensors[:4])
    if not complete or not at_home or not all(_writes_are_seen(tensor) for tensor in present):
        return None
    if layer.weight.dtype not in _SERVED or not layer.weight.numel():
        return None
    _listen()
    memory = [(t, t._version, t.data_ptr(), StorageWeakRef(t.untyped_storage())) for t in present]
    made = _Folded(norm, norm.eps, tensors, memory, *_fold(layer, norm, known))
    _folded[layer] = made
    return made


def _fold(layer: nn.Linear, norm: nn.BatchNorm1d, known: _Folded | None) -> tuple[Tensor, Tensor, bool]:
    """Weight and bias, in the memory of those known where they fit it, and whether their dtype can hold them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.inference_mode(False), torch.no_grad():
        dtype = layer.weight.dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        scale = (norm.running_var.to(exact) + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight
        bias = -norm.running_mean.to(exact) if layer.bias is None else layer.bias - norm.running_mean.to(exact)
        bias = bias * scale
        if norm.bias is not None:
            bias = bias + norm.bias
        wide = layer.weight * scale[:, None]
        weight, bias = wide.to(dtype), bias.to(dtype)
        # float16 overflows, and has few digits left below 6e-5: each row must be as exact as its dtype allows. False for NaN.
        largest, error = (torch.linalg.vector_norm(rows, torch.inf, 1) for rows in (wide, weight - wide))
        held = (error <= torch.finfo(dtype).eps * largest).all() & bias.isfinite().all()
        if known is not None and (known.weight.shape, known.weight.dtype, known.weight.device) == (
            weight.shape, dtype, weight.device,
        ):  # fmt: skip
            weight, bias = known.weight.copy_(weight), known.bias.copy_(bias)
        return weight, bias, bool(held)  # waits for the device: the next reader may be on another stream


def _writes_are_seen(tensor: Tensor) -> bool:
    """Nobody counts the writes to a tensor made under inference_mode, and other processes do not count theirs."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not tensor.is_inference() and not (tensor.is_cpu and tensor.is_shared())  # on CUDA every tensor says it is


def _listen() -> None:
    """Be told of the steps of all optimizers: the fused ones of PyTorch move no version."""
    global _listening
    if not _listening:
        _listening = True
        register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _folded:
        return
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _folding:
        for known in _folded.values():
            if not written.isdisjoint(known.ids):
                known.fresh = False
