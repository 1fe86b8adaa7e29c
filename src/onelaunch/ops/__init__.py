"""Level 1: fused ops with autograd, each a `torch.library` custom op. The first call on a GPU imports Triton."""

from onelaunch.ops.batch_norm import batch_norm
from onelaunch.ops.cross_entropy import cross_entropy
from onelaunch.ops.linear import linear
from onelaunch.ops.linear_cross_entropy import linear_cross_entropy
from onelaunch.ops.norm import layer_norm, rms_norm
from onelaunch.ops.relu_dropout import relu_dropout

__all__ = [
    "batch_norm", "cross_entropy", "layer_norm", "linear", "linear_cross_entropy", "relu_dropout", "rms_norm"
]  # fmt: skip
