"""Level 3: whole training runs."""

from onelaunch.train.fit import fit
from onelaunch.train.history import History

__all__ = ["History", "fit"]
