"""Level 1: fused ops with autograd, each a `torch.library` custom op. Triton is imported by the first call on a GPU."""

from onelaunch.ops.batch_norm import BatchNorm1d, batch_norm
from onelaunch.ops.cross_entropy import CrossEntropyLoss, cross_entropy
from onelaunch.ops.linear import Linear, linear
from onelaunch.ops.relu_dropout import ReLUDropout, relu_dropout

__all__ = [
    "BatchNorm1d",
    "CrossEntropyLoss",
    "Linear",
    "ReLUDropout",
    "batch_norm",
    "cross_entropy",
    "linear",
    "relu_dropout",
]
