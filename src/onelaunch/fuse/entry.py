"""What PyTorch loads for `torch.compile(model, backend="onelaunch")`, before it captures the model."""

from onelaunch.fuse.backend import onelaunch
from onelaunch.fuse.substitutes import substitute

__all__ = ["onelaunch"]

substitute()
