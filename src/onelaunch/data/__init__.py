"""Datasets: `load` a known one or a file, `split` a test part off it."""

from onelaunch.data.dataset import Dataset, split
from onelaunch.data.sources import NAMES, load

__all__ = ["NAMES", "Dataset", "load", "split"]
