"""Datasets: `load` returns a known set or the rows of a file, `split` holds a test part out of it."""

from onelaunch.data.dataset import Dataset, split
from onelaunch.data.sources import NAMES, load

__all__ = ["NAMES", "Dataset", "load", "split"]
