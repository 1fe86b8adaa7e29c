"""Level 2: any `nn.Module` through `torch.compile`, with our kernels where they win.

Dynamo captures the model, the patterns of `patterns/` rewrite the captured graph, and Inductor compiles the rest. `fuse` makes
a compiled module, `train_step` a whole training step as one CUDA graph, and `explain` says what is done and why.
"""

from onelaunch.fuse.explain import explain
from onelaunch.fuse.explanation import Explanation
from onelaunch.fuse.fuse import fuse
from onelaunch.fuse.train_step import train_step

__all__ = ["Explanation", "explain", "fuse", "train_step"]
