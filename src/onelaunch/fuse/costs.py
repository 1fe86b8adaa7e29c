"""What operations cost on a CUDA device, apart and fused: each tensor a kernel reads or writes, once; forward and backward.

"Apart" is what PyTorch launches for a call; "fused" is what the kernels of level 1 read and write (`docs/ops.md`). The
backward of an operation outside the tables is taken to be as much again as its forward, twice that for products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from onelaunch.activations import saves_input
from onelaunch.fuse.roofline import Cost
from onelaunch.ops.cross_entropy import COUNT_FIRST_CLASSES

NOTHING = Cost()


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Step:
    """One operation of a running model, with what it costs by itself."""

    role: str  # as in `operations`, or the function's name
    name: str
    label: str  # the module or function, for people
    inputs: list[Spec]
    output: Spec
    options: dict[str, float] = field(default_factory=dict)  # dropped, training, bias, smoothing, classes
    forward: Cost = NOTHING
    backward: Cost = NOTHING
    sources: tuple[int, ...] = ()  # the steps whose results it reads

    @property
    def work(self) -> Work:
        return Work(self.forward, self.backward)


class Work(NamedTuple):
    forward: Cost
    backward: Cost

    @property
    def total(self) -> Cost:
        return self.forward + self.backward


def _product(step: Step) -> tuple[int, int, int]:
    """m, k, n of a linear layer."""
    k, n = step.inputs[1].shape[1], step.inputs[1].shape[0]
    return step.output.numel // max(1, n), k, n


def _products_backward(step: Step) -> Cost:
    """The products for the gradients of x and of the weight, each reading the output's gradient."""
    m, k, n = _product(step)
    x, weight = step.inputs[:2]
    cost = Cost()
    for wanted, read in ((x, weight), (weight, x)):
        if wanted.requires_grad:
            cost += Cost(step.output.bytes + read.bytes + wanted.bytes, 2 * m * k * n, 1)
    return cost


def _reads_twice(step: Step) -> bool:
    """PyTorch's backward of log_softmax reads its gradient twice, for the sum and for the result, if a row is long."""
    shape = step.inputs[0].shape
    return len(shape) > 1 and shape[1] > 1024


def apart(step: Step) -> Work:
    """What PyTorch does for one operation of the tables."""
    size = step.output.bytes  # of one pass over the elements
    n = step.output.numel
    differentiated = step.output.requires_grad
    training = bool(step.options.get("training"))
    match step.role:
        case "linear":
            m, k, columns = _product(step)
            forward = Cost(sum(spec.bytes for spec in step.inputs) + size, 2 * m * k * columns, 1)
            bias = Cost(size, 0, 1) if step.options.get("bias") else Cost()
            backward = _products_backward(step) + bias
        case "activation":
            forward, backward = Cost(2 * size, n, 1), Cost(3 * size, n, 1)
        case "dropout":
            active = bool(step.options.get("dropped"))
            forward = Cost(2 * size + n, n, 1) if active else Cost()
            backward = Cost(2 * size + n, n, 1) if active else Cost()
        case "batch_norm":
            forward = Cost(3 * size, 6 * n, 5) if training else Cost(2 * size, 2 * n, 1)
            backward = Cost(5 * size, 8 * n, 3) if training else Cost(3 * size, 4 * n, 2)
        case "log_softmax":
            forward, backward = Cost(2 * size, 4 * n, 1), Cost((3 + _reads_twice(step)) * size, 4 * n, 1)
        case "nll_loss":
            logits = step.inputs[0].bytes
            forward, backward = Cost(0, 0, 1), Cost(logits, 0, 2)
        case _:  # cross_entropy
            logits, n = step.inputs[0].bytes, step.inputs[0].numel
            smooth = 1 if step.options.get("smoothing") else 0
            forward = Cost((2 + smooth) * logits, 4 * n, 2 + 5 * smooth)
            backward = Cost((4 + _reads_twice(step) + 3 * smooth) * logits, 4 * n, 3 + 3 * smooth)
    return Work(forward, backward if differentiated else Cost())


def fused(steps: Sequence[Step], extra_pass: bool = False) -> Work:
    """What the kernels of level 1 do for a chain. `extra_pass`: cuBLAS and one pass were chosen for the linear layer."""
    first, last = steps[0], steps[-1]
    roles = {step.role: step for step in steps}
    size, n = last.output.bytes, last.output.numel
    dropped = bool(roles["dropout"].options.get("dropped")) if "dropout" in roles else False
    bits = n / 8 if dropped else 0.0
    activation = roles["activation"].name if "activation" in roles else None
    differentiated = last.output.requires_grad
    extra = sum(step.forward.flops for step in steps[1:])
    match first.role:
        case "linear":
            m, k, columns = _product(first)
            reads = sum(spec.bytes for spec in first.inputs)
            keeps_z = differentiated and saves_input(activation)
            forward = Cost(reads + size + (size if keeps_z else 0) + bits, 2 * m * k * columns + extra, 1)
            if extra_pass:
                forward += Cost((size if keeps_z else 2 * size), 0, 1)
            reads_saved = activation is not None and not (activation == "relu" and dropped)
            slope = Cost((2 + reads_saved) * size + bits, 2 * n, 2 if first.options.get("bias") else 1)
            backward = slope + _products_backward(first)
        case "batch_norm":
            training = bool(first.options.get("training"))
            forward = Cost((3 if training else 2) * size + bits, first.forward.flops + extra, 4)
            backward = Cost((5 if training else 3) * size + 2 * bits, 8 * n + extra, 3)
        case "activation":
            reads_saved = not dropped  # relu's mask is in the bits
            forward, backward = Cost(2 * size + bits, 2 * n, 1), Cost((2 + reads_saved) * size + bits, n, 1)
        case _:  # a loss
            logits = first.inputs[0]
            half = logits.dtype == torch.float16
            classes = logits.shape[1] if len(logits.shape) > 1 else 0
            writes = differentiated and not half
            counting = 0  # launches that count the rows before the pass; of very many rows they are PyTorch's
            if writes and classes >= COUNT_FIRST_CLASSES:
                counting = 1 if logits.numel // classes <= 65_536 else 3
            forward = Cost((2 if writes else 1) * logits.bytes, 6 * logits.numel, 2 + counting)
            backward = Cost(2 * logits.bytes if half else 0, logits.numel, 1)
    return Work(forward, backward if differentiated else Cost())
