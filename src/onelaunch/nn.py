"""The fused ops as modules; each loads and saves the `state_dict` of the `torch.nn` module it replaces."""

from onelaunch.ops import BatchNorm1d, CrossEntropyLoss, Linear, ReLUDropout

__all__ = ["BatchNorm1d", "CrossEntropyLoss", "Linear", "ReLUDropout"]
