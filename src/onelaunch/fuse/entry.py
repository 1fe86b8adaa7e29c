"""What PyTorch loads for `torch.compile(model, backend="onelaunch")`, before it captures the model."""

from onelaunch.capture.substitutes import substitute
from onelaunch.fuse.backend import onelaunch

__all__ = ["onelaunch"]

substitute()
