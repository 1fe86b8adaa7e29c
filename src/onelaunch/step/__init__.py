"""Level 2's training step: forward, loss, backward, clipping and optimizer as one CUDA graph per input shape."""

from onelaunch.step.train_step import train_step

__all__ = ["train_step"]
