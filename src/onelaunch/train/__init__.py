"""Level 3: whole training runs."""

from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.train.callbacks import CsvLogger, TensorBoardLogger
from onelaunch.train.fit import fit
from onelaunch.train.history import History
from onelaunch.train.lr_find import LrRange, lr_find
from onelaunch.train.predict import predict
from onelaunch.train.predictor import Predictor, load

__all__ = [
    "CsvLogger",
    "EarlyStopping",
    "History",
    "LrRange",
    "Predictor",
    "TensorBoardLogger",
    "fit",
    "load",
    "lr_find",
    "predict",
]
