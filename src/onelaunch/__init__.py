"""onelaunch: one op, one model, one whole training run in one launch."""

from onelaunch.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    OnelaunchError,
    UnsupportedError,
)
from onelaunch.rng import permutation
from onelaunch.train import History, fit

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "History",
    "OnelaunchError",
    "UnsupportedError",
    "fit",
    "permutation",
]
