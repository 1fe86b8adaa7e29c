"""Level 2: any `nn.Module` through `torch.compile`, with our kernels where they win.

Dynamo captures the model, the patterns of `patterns/` rewrite the captured graph, and Inductor compiles the rest. `fuse` makes
a compiled module, and `explain` says what is done and why. `onelaunch.step` records whole training steps.
"""

from onelaunch.fuse.explain import explain
from onelaunch.fuse.explanation import Explanation
from onelaunch.fuse.fuse import fuse

__all__ = ["Explanation", "explain", "fuse"]
