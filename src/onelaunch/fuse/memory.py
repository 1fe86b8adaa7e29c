"""What lies in memory on a chain's account where it is fullest, apart and fused: bytes beside its input, weights and result
and the gradients of these, which are the same either way.

"Apart" is what PyTorch's autograd keeps and makes on a CUDA device: each operation keeps its input or its output (or a byte an
element for dropout) until its backward has run, and hands a gradient of its own to the operation before it. "Fused" is what
the ops of level 1 keep and make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onelaunch.activations import saves_input
from onelaunch.fuse.costs import Step

KEEPS_OUTPUT = ("relu", "sigmoid", "tanh")  # of PyTorch's own activations; the others keep their input


def memory(steps: Sequence[Step]) -> tuple[float, float]:
    """Bytes of a chain apart and fused."""
    return _apart(steps), _fused(steps)


def kept_apart(steps: Sequence[Step]) -> float:
    """Bytes PyTorch keeps from the forward to the backward."""
    return _size(_kept(steps, range(len(steps))), steps)


def kept_fused(steps: Sequence[Step]) -> float:
    """The same for the op in the chain's place."""
    first, last = steps[0], steps[-1]
    if not last.output.requires_grad:
        return 0.0
    bits = last.output.numel / 8 if any(_drops(step) for step in steps) else 0.0
    if first.role == "linear":
        return bits + (last.output.bytes if _keeps_z(steps) else 0)
    if first.role in ("log_softmax", "cross_entropy") and first.inputs[0].dtype != torch.float16:
        return first.inputs[0].bytes  # the gradient, made together with the loss
    return bits


def _apart(steps: Sequence[Step]) -> float:
    """The fullest moment of a walk forward and back. A value is named by its step, -1 is the chain's input."""
    last, moments = len(steps) - 1, []
    for at, step in enumerate(steps):
        lying = _kept(steps, range(at + 1)) | {("value", at - 1), ("value", at)}
        lying |= {("logits", at)} if step.role == "cross_entropy" else set()
        moments.append(_size(lying, steps))
    if steps[-1].output.requires_grad:
        for at in range(last, -1, -1):
            # The gradients of the result and of the input are not the chain's own.
            gradients = {("gradient", value) for value in (at, at - 1) if 0 <= value < last}
            made = steps[at].inputs[0].bytes if steps[at].role == "cross_entropy" else 0  # of the log-probabilities
            moments.append(_size(_kept(steps, range(at + 1)) | gradients, steps) + made)
    return max(moments)


def _fused(steps: Sequence[Step]) -> float:
    first, last = steps[0], steps[-1]
    kept = kept_fused(steps)
    if first.role == "linear" and last.output.requires_grad and not _keeps_z(steps):
        kept += last.output.bytes  # dz; z gives its own memory to it
    if any(step.role == "batch_norm" for step in steps[1:]):
        kept += first.inputs[1].bytes  # the folded weights, which stay
    return kept


def _kept(steps: Sequence[Step], which: range) -> set[tuple[str, int]]:
    kept: set[tuple[str, int]] = set()
    for at in which:
        step = steps[at]
        if not step.output.requires_grad:
            continue
        if step.role == "dropout":
            kept |= {("mask", at)} if _drops(step) else set()
        elif step.role == "cross_entropy":
            kept |= {("logits", at)}
        elif step.role == "log_softmax" or (step.role == "activation" and step.name in KEEPS_OUTPUT):
            kept |= {("value", at)}
        else:
            kept |= {("value", at - 1)}
    return kept


def _size(lying: set[tuple[str, int]], steps: Sequence[Step]) -> float:
    """Of these things together; the chain's input and its result, which others hold, do not count."""
    sizes = {}
    for what, at in lying:
        while what == "value" and 0 <= at < len(steps) - 1 and steps[at + 1].options.get("inplace"):
            at += 1  # which has its memory
        if what == "mask":
            sizes[what, at] = steps[at].output.numel
        elif what == "logits":
            sizes[what, at] = steps[at].inputs[0].bytes
        elif 0 <= at < len(steps) - 1:
            sizes[what, at] = steps[at].output.bytes
    return sum(sizes.values())


def _drops(step: Step) -> bool:
    return step.role == "dropout" and bool(step.options.get("dropped"))


def _keeps_z(steps: Sequence[Step]) -> bool:
    """Whether the op for a linear layer keeps the value before the activation."""
    activation = next((step.name for step in steps if step.role == "activation"), None)
    return saves_input(activation)
