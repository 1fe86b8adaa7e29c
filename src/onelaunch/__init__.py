"""onelaunch: one op, one model, one whole training run in one launch."""

from onelaunch import nn
from onelaunch.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    OnelaunchError,
    UnsupportedError,
)
from onelaunch.ops import batch_norm, cross_entropy, linear, relu_dropout
from onelaunch.rng import permutation
from onelaunch.train import History, fit
from onelaunch.version import VERSION as __version__

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "Explanation",
    "History",
    "OnelaunchError",
    "UnsupportedError",
    "__version__",
    "batch_norm",
    "cross_entropy",
    "explain",
    "fit",
    "fuse",
    "linear",
    "nn",
    "permutation",
    "relu_dropout",
]
