"""The public names. `import onelaunch` takes them from here; the command line leaves them out until a command needs them."""

import sys

from onelaunch import nn
from onelaunch.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    OnelaunchError,
    UnsupportedError,
)
from onelaunch.fuse import Explanation, explain, fuse
from onelaunch.ops import (
    batch_norm,
    cross_entropy,
    layer_norm,
    linear,
    linear_cross_entropy,
    relu_dropout,
    rms_norm,
)
from onelaunch.rng import permutation
from onelaunch.step import train_step
from onelaunch.sweep import Sweep, sweep
from onelaunch.train import (
    CsvLogger,
    EarlyStopping,
    History,
    Predictor,
    TensorBoardLogger,
    fit,
    load,
    lr_find,
    predict,
)
from onelaunch.version import VERSION as __version__

__all__ = [
    "CheckpointError",
    "CsvLogger",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "Explanation",
    "History",
    "OnelaunchError",
    "Predictor",
    "Sweep",
    "TensorBoardLogger",
    "UnsupportedError",
    "__version__",
    "batch_norm",
    "cross_entropy",
    "explain",
    "fit",
    "fuse",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "load",
    "lr_find",
    "nn",
    "permutation",
    "predict",
    "relu_dropout",
    "rms_norm",
    "sweep",
    "train_step",
]


def publish() -> None:
    """Put the public names into the package `onelaunch`, in a process of the command line, whose start left them out."""
    vars(sys.modules["onelaunch"]).update({name: globals()[name] for name in ("__all__", *__all__)})
