"""Level 2: fuses the chains of any `nn.Module` with the ops of level 1, and explains each decision."""

from onelaunch.fuse.explain import explain
from onelaunch.fuse.explanation import Explanation
from onelaunch.fuse.fuse import fuse

__all__ = ["Explanation", "explain", "fuse"]
