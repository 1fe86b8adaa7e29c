"""Level 3: whole training runs."""

from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.train.callbacks import CsvLogger, TensorBoardLogger
from onelaunch.train.fit import fit
from onelaunch.train.history import History
from onelaunch.train.predict import predict

__all__ = ["CsvLogger", "EarlyStopping", "History", "TensorBoardLogger", "fit", "predict"]
