"""Level 2: fuses the chains of any `nn.Module` with the ops of level 1, and explains each decision."""

from onelaunch.fuse.fuse import fuse

__all__ = ["fuse"]
